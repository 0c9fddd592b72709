"""The user's script as the ranks of a job: its start, its signals and its end."""
