"""Parents of processes, by prctl(2): adopt orphans, and die with the parent."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its parent."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends; for a child process, before its exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
