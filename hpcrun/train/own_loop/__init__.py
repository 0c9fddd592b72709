"""Exact resume of loops that are not hpcrun's: stop, checkpoints, position, and what a loop carries."""
