"""Signals as facts to look at between two steps, not as exceptions between any two lines.

Half a submission is a job that nobody knows of, and half a line read is a line lost.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noted(*numbers: signal.Signals) -> Iterator[list[signal.Signals]]:
    """Within the block the signals only join the list, in the order they come; see ``signal.raise_signal``.

    What is ignored stays ignored: ``nohup`` and a shell's ``&`` mean it. Python gives signals to the main
    thread only: in another thread the list stays empty.
    """
    seen: list[signal.Signals] = []

    def note(number: int, _frame: object) -> None:
        seen.append(signal.Signals(number))

    before = {
        number: signal.getsignal(number)
        for number in (numbers if _in_main_thread() else ())
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, note)
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
