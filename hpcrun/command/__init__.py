"""The command after ``--``: its checks, and its start by a launcher."""
