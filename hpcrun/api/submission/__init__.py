"""Submission of a run: its config, its plan, the copy of its code, and the hand-over to the scheduler."""
