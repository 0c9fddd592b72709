"""The logs of the ranks of a run: their files, and one text merged by time."""
