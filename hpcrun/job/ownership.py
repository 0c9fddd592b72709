"""Refuse a job if another live job has the run: a second submission must not take the run over.

A newer attempt of the same job may take over, because Slurm starts it only after the first has released its
nodes. For another job, only Slurm knows.
"""

import os

from hpcrun.job.scheduler_view import query_job
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import Ended, FoundOccupied, Opened, Prepared, Submitted
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.opening import Occupied
from hpcrun.run.journal.state import State
from hpcrun.slurm.answers import is_over


def require_free(run: RunDirectory, attempt: Attempt, state: State) -> None:
    """Check that no other job of this cluster has the run or waits to continue it.

    The logged refusal belongs to no attempt, so it changes nothing for the other job.

    Raises:
        Occupied: another job does.
        OSError: the run directory cannot be written.
    """
    job = _job_before(state, attempt)
    view = query_job(job) if job is not None else None
    # A COMPLETING job has been asked to end, and its ranks will see the new owner.
    if view is None or is_over(view.state) or view.being_ended:
        return
    Journal(run).append(FoundOccupied(refused=attempt.owner, holder=job))
    raise Occupied(_line(run, attempt, str(job)))


def require_own_number(run: RunDirectory, attempt: Attempt, state: State) -> None:
    """Check that no job of another cluster has opened the run under the same number: both use one log folder.

    Raises:
        Occupied: a job of another cluster has.
        OSError: the run directory cannot be read.
    """
    here = os.environ.get("SLURM_CLUSTER_NAME")
    for event in state.openings if here else ():
        if event.attempt and event.attempt.job == attempt.job:
            there = event.cluster or here
            if there != here:
                raise Occupied(
                    f"{run.name}: job {attempt.job} of cluster {there} already used this number, which names "
                    "the log files; submit this job again to get another number"
                )


def refusal(run: RunDirectory, state: State, attempt: Attempt) -> str | None:
    """Return the message with which `require_free` has refused ``attempt``, or None."""
    for event in state.of_kind(FoundOccupied):
        if event.refused == attempt.owner:
            return _line(run, attempt, str(event.holder))
    return None


def _line(run: RunDirectory, attempt: Attempt, holder: str) -> str:
    return (
        f"{run.name}: job {holder} already has this run; job {attempt.job} does not start; follow it "
        "with `hpcrun logs -f`, or end it with `hpcrun cancel` first"
    )


def _job_before(state: State, attempt: Attempt) -> str | None:
    """Return the last job of this cluster that held the run, unless it is over or the attempt's own job."""
    here, found = os.environ.get("SLURM_CLUSTER_NAME"), None
    over: set[str] = set()
    for event in state.events:
        if event.attempt is None:
            continue
        if event.attempt.job == attempt.job:
            # The attempt's own job has the run since.
            found = None if isinstance(event, Prepared | Opened) else found
            continue
        job = event.attempt.job
        if isinstance(event, Submitted | Prepared | Opened) and event.executor == "slurm":
            over.discard(job)
            elsewhere = here is not None and (event.cluster or here) != here
            found = None if elsewhere else job
        elif isinstance(event, Ended) and event.restart_allowed is False:
            over.add(job)
    return None if found in over else found
