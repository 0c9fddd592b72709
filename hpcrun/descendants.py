"""Processes that end with their parent, and a parent that adopts orphans (prctl(2)).

This base module may be imported by every package.
"""

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
