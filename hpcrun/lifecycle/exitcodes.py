"""What a process's exit code says. Zero means that the training is done, and nothing else does."""

DONE = 0
"""The training finished and its result is written."""

FAILED = 1
"""A failure in training, or a run that ended in failure."""

BAD_INPUT = 2
"""Bad input: one line said what; starting again would not help."""

SAVE_FAILED = 74
"""Stopped, but the checkpoint could not be written (sysexits.h EX_IOERR): not requeued blindly."""

UNFINISHED = 75
"""Stopped at a committed checkpoint, to be continued (sysexits.h EX_TEMPFAIL)."""

TERMINATED = 143
"""A batch script whose run was stopped on request (128 + SIGTERM): neither done nor to be requeued."""
