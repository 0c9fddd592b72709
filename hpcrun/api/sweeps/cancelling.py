"""The cancellation of all runs of a sweep."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.api.cancelling import note_end, time_to_end
from hpcrun.api.sweeps.unrecorded import record_killed_submission
from hpcrun.errors import UserError
from hpcrun.run.directory import RunDirectory
from hpcrun.run.sweep_file import read_sweep
from hpcrun.slurm.launch import jobs, stopping


@dataclass(frozen=True)
class Cancelled:
    """The cancellation of one run. ``words``: the action, or the reason why nothing was done."""

    run: RunDirectory
    done: bool
    words: str


def cancel_sweep(folder: Path, *, now: bool = False) -> Iterator[Cancelled]:
    """Cancel every run of the sweep in ``folder`` that has a job, and yield the outcome of each.

    Args:
        now: kill the ranks, without a checkpoint.

    Raises:
        RunError: ``sweep.json`` is damaged.
    """
    record_killed_submission(folder)
    sweep = read_sweep(folder)
    runs = [run for run in (sweep.directories.values() if sweep else ()) if run.exists()]
    found = [pair for pair in zip(runs, jobs.states(runs), strict=True) if pair[1].live]
    # Waiting runs first: Slurm would start a waiting run in the place of a cancelled run.
    ended: set[str] = set()
    for run, state in sorted(found, key=lambda pair: pair[1].word == "running"):
        try:
            if state.executor == "slurm" and state.job in ended:
                # Runs that share a job.
                stopping.note_cancelled(run, str(state.job))
                yield Cancelled(run, True, f"job {state.job}: ends with the run before")
                continue
            words = (stopping.kill if now else stopping.cancel)(run, whole=True)
            ended.add(str(state.job))
            yield Cancelled(run, True, words)
        except (UserError, OSError) as error:
            # A run may end between the two calls. The other runs must still be cancelled.
            yield Cancelled(run, False, str(error))


def wait_for_ends(runs: Sequence[RunDirectory]) -> list[RunDirectory]:
    """Wait for the end of all cancelled jobs together, and record each end; return runs with a live job."""
    start, live = time.monotonic(), []
    for run in runs:
        limit = start + time_to_end(run) - time.monotonic()
        if jobs.wait_until_ended(run, max(limit, 1.0)):
            note_end(run)
        else:
            live.append(run)
    return live
