"""Checks of every node of a job, in the seconds before its ranks start."""
