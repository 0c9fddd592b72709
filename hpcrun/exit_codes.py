"""The exit codes of a rank, a job and a command.

This base module may be imported by every package.
"""

DONE = 0
"""The training finished and its result is written."""

FAILED = 1
"""A failure in training, or a run that ended in failure."""

BAD_INPUT = 2
"""Bad input: one line explains the problem; another start would fail in the same way."""

SAVE_FAILED = 74
"""Stopped, but the checkpoint could not be written (sysexits.h EX_IOERR): not requeued blindly."""

UNFINISHED = 75
"""Stopped at a committed checkpoint and to be continued (sysexits.h EX_TEMPFAIL)."""

AGAIN_IN_PLACE = 76
"""To be continued without the delay of a requeue (`hpcrun finalize`, for the local cluster only)."""

INTERRUPTED = 130
"""A person ended the command or the run with Ctrl-C (128 + SIGINT)."""

TERMINATED = 143
"""The run was stopped on request (128 + SIGTERM; batch scripts only): not done, and not requeued."""
