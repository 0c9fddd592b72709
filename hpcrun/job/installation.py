"""The files of this package, to notice an upgrade while a job runs.

An upgrade replaces the files under a running process. The process keeps the code that it has imported, and
each program that it starts has the new code. Old and new code must not work on one attempt: the next attempt
comes by a requeue, which starts every program again.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def _stamp() -> frozenset[tuple[str, int, int]]:
    """Return path, size and time of change of every module."""
    found = set()
    for path in _PACKAGE.rglob("*.py"):
        state = path.stat()
        found.add((str(path), state.st_size, state.st_mtime_ns))
    return frozenset(found)


_AT_START = _stamp()


def was_upgraded() -> bool:
    """Return True if the modules of this package are other files than at the start of this process."""
    try:
        return _stamp() != _AT_START
    except OSError:
        # A module went away between two calls: the upgrade runs now.
        return True
