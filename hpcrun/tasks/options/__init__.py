"""Options of the built-in tasks, separate from the tasks so that checking them needs no torch."""
