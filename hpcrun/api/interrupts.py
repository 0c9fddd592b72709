"""Signals recorded for a check between two steps.

A signal raises no exception here: in the middle of a submission an exception would leave an unrecorded job,
and in the middle of a read it would lose a line.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noted(*numbers: signal.Signals) -> Iterator[list[signal.Signals]]:
    """Append the signals to the yielded list, in order, and do nothing else; see ``signal.raise_signal``.

    Ignored signals stay ignored: ``nohup`` and a shell's ``&`` rely on it. Python delivers signals to the
    main thread only: in another thread the list stays empty.
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
