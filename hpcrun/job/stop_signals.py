"""The signals by which Slurm or a person ends a job or warns it, as the batch step receives them."""

import signal
from collections.abc import Callable
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
