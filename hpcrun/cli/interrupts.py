"""Signals as facts to look at between two steps, not as exceptions between any two lines.

Half a submission is a job that nobody knows of, and half a line read is a line lost.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noted(*numbers: signal.Signals) -> Iterator[list[signal.Signals]]:
    """Within the block the signals only join the list, in the order they come; see ``signal.raise_signal``.

    What is ignored stays ignored: ``nohup`` and a shell's ``&`` mean it.
    """
    seen: list[signal.Signals] = []

    def note(number: int, _frame: object) -> None:
        seen.append(signal.Signals(number))

    before = {
        number: signal.getsignal(number)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, note)
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
