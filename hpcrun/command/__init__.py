"""The command after ``--``: what its words say before it runs, and how a launcher starts it."""
