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


# An upgrade replaces all files of the package.
_FILE = Path(__file__)


def _stamp() -> tuple[int, int]:
    state = _FILE.stat()
    return state.st_ino, state.st_mtime_ns


_AT_START = _stamp()


def was_upgraded() -> bool:
    """Return True if the files of this package are others than at the start of this process."""
    try:
        return _stamp() != _AT_START
    except OSError:
        # The upgrade runs now.
        return True
