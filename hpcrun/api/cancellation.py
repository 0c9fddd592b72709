"""The cancellation of the runs of a folder, and the wait for the ends of cancelled runs."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.config import load_resolved
from hpcrun.errors import UserError
from hpcrun.job.finalize import write_result
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from hpcrun.run.journal.events import Cause
from hpcrun.run.journal.journal import Journal
from hpcrun.run.sweep_file import read_sweep
from hpcrun.slurm.launch import jobs, stopping


@dataclass(frozen=True)
class Cancelled:
    """The cancellation of one run. ``words``: the action, or the reason why nothing was done."""

    run: RunDirectory
    done: bool
    words: str


def cancel_all(folder: Path, *, now: bool = False) -> Iterator[Cancelled]:
    """Cancel every run in the folder of a sweep that has a job, and yield the outcome of each.

    Args:
        now: kill the ranks, without a checkpoint.

    Raises:
        RunError: ``sweep.json`` is damaged.
    """
    sweep = read_sweep(folder)
    runs = [run for run in (sweep.directories.values() if sweep else ()) if run.exists()]
    found = [pair for pair in zip(runs, jobs.states(runs), strict=True) if pair[1].live]
    # Waiting runs first: Slurm would start a waiting run in the place of a cancelled run.
    for run, _ in sorted(found, key=lambda pair: pair[1].word == "running"):
        try:
            yield Cancelled(run, True, (stopping.kill if now else stopping.cancel)(run))
        except (UserError, OSError) as error:
            # A run may end between the two calls. The other runs must still be cancelled.
            yield Cancelled(run, False, str(error))


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
