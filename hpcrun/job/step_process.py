"""The process of the batch step: the signals that it has received, and the files of its code.

An upgrade replaces the files under a running process. The process keeps the code that it has imported, and
each program that it starts has the new code. Old and new code must not work on one attempt: the next attempt
comes by a requeue, which starts every program again.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})

_arrived: set[signal.Signals] = set()


def go_on(number: int, _frame: FrameType | None) -> None:
    """Handle a signal that the ranks have received as well: remember it."""
    _arrived.add(signal.Signals(number))


def arrived_signals() -> set[signal.Signals]:
    """Return the stop signals that this process has received, also those that it blocks.

    While the main thread blocks a signal, another thread may receive it.
    """
    return _arrived | {signal.Signals(number) for number in signal.sigpending() & STOP_SIGNALS}


def on_stop_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Install ``handler`` for these signals."""
    for number in STOP_SIGNALS:
        signal.signal(number, handler)


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
