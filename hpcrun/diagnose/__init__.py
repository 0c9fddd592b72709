"""The cause of a job's end: the first cause, separated from its consequences."""
