"""The state of one run and of many, as `hpcrun status` and ``Run.status`` report it."""
