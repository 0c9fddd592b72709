"""Built-in tasks. Their names and options are in hpcrun/config/tasks."""
