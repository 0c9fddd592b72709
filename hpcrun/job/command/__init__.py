"""The command after ``--``: the programs visible in its words, and its start by a launcher."""
