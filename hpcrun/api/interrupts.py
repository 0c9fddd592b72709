"""Signals recorded for a check between two steps, and the wait for the ends of cancelled runs.

A signal raises no exception here: in the middle of a submission an exception would leave an unrecorded job,
and in the middle of a read it would lose a line.
"""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hpcrun.config import load_resolved
from hpcrun.job.finalize import write_result
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from hpcrun.run.journal.events import Cause
from hpcrun.run.journal.journal import Journal
from hpcrun.slurm.launch import jobs


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


def _time_to_end(run: RunDirectory) -> float:
    """Return the seconds within which a cancelled job of ``run`` ends, with a margin."""
    job = load_resolved(run.config).job
    return max(job.grace, float(job.kill_wait)) + 60.0


def wait_for_ends(runs: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Wait for the end of all cancelled jobs together, and record each end; return runs with a live job."""
    start, live = time.monotonic(), []
    for run in runs:
        limit = start + _time_to_end(run) - time.monotonic()
        if jobs.wait_until_ended(run, max(limit, 1.0)):
            note_end(run)
        else:
            live.append(run)
    return live


def note_end(run: RunDirectory) -> None:
    """Write the result of ``run`` after the end of its job, if there is no result yet.

    Raises:
        OSError: the run directory cannot be written.
    """
    if read_json(run.result) is None:
        # The job was waiting, or its batch script was killed: no other process writes a result.
        state = Journal(run).read()
        words = "cancelled; `hpcrun resume` continues it"
        write_result(run, state, Cause.CANCELLED, "", words, state.committed)
