"""Whether a run has another job that lives: one that a person submits beside it must not take it over.

A newer attempt of the same job may, because Slurm starts no second one while the first has its nodes. Of
another job nobody knows that but Slurm.
"""

import os
from collections.abc import Sequence

from hpcrun.cluster.slurm.job_states import is_over
from hpcrun.errors import UserError
from hpcrun.lifecycle.end.scheduler_view import look_at
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, Event, read_events, record_event
from hpcrun.run.io.files import make_folders

# slurm.conf(5), MaxJobId: ids from here up are those of a federation, equal on all of its clusters.
_FEDERATED = 1 << 26


class Occupied(UserError):
    """Another job has the run, and keeps it."""


def require_free(run: RunDirectory, attempt: Attempt) -> None:
    """Return unless another job of this cluster holds the run, or waits to go on with it.

    What the log says of the refusal belongs to no attempt, so that it changes nothing for the other job.

    Raises:
        Occupied: it does.
        OSError: the run directory cannot be written.
    """
    job = _job_before(read_events(run), attempt)
    view = look_at(job) if job is not None else None
    # A job that is COMPLETING has been told to end, and its ranks find the new owner's name.
    if view is None or is_over(view.state) or view.being_ended:
        return
    record_event(run, "occupied", refused=attempt.owner, holder=job)
    raise Occupied(_line(run, attempt, str(job)))


def require_own_number(run: RunDirectory, job: str) -> None:
    """Return unless a job of another cluster has the same number, and with it the same log folder.

    The folder belongs to the first cluster that starts such a job: a file in it holds the cluster's name.

    Raises:
        Occupied: the folder belongs to another cluster.
        OSError: the run directory cannot be written.
    """
    here = os.environ.get("SLURM_CLUSTER_NAME")
    if not here:
        return
    path = run.job_logs(job) / "cluster"
    make_folders(path.parent, below=run.path)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        there = path.read_text().strip()
    else:
        with open(descriptor, "w") as stream:  # noqa: PTH123
            stream.write(f"{here}\n")
        return
    # A file without a name was left by a crash, or by a full disk.
    if there and there != here:
        raise Occupied(same_number(run, job, there))


def same_number(run: RunDirectory, job: str, cluster: str) -> str:
    """Return the line for a job with the number of another job of the run, on another cluster.

    A federation moves a job to a sibling cluster under the same number.
    """
    if job.isdecimal() and int(job) >= _FEDERATED:
        return (
            f"{run.name}: job {job} of a federation started on cluster {cluster}, and a run does not move to "
            f"another one; continue with `hpcrun resume {run.name} job.cluster={cluster}`"
        )
    return (
        f"{run.name}: cluster {cluster} has started a job {job} for it, and log files are named by that "
        "number; submit this one again: it gets another number"
    )


def refusal(run: RunDirectory, attempt: Attempt) -> str | None:
    """The line with which `require_free` has refused ``attempt``, if it has."""
    for event in read_events(run):
        if event.what == "occupied" and event.fields.get("refused") == attempt.owner:
            return _line(run, attempt, str(event.fields.get("holder")))
    return None


def _line(run: RunDirectory, attempt: Attempt, holder: str) -> str:
    return (
        f"{run.name}: has job {holder}, which job {attempt.job} leaves alone; follow it with `hpcrun logs "
        "-f`, or end it with `hpcrun cancel` first"
    )


def _job_before(events: Sequence[Event], attempt: Attempt) -> str | None:
    """The job of this cluster's Slurm that had the run last, unless it is over or the attempt's own."""
    here, found = os.environ.get("SLURM_CLUSTER_NAME"), None
    over: set[str] = set()
    for event in events:
        if event.attempt is None:
            continue
        if event.attempt.job == attempt.job:
            # It has had the run since.
            found = None if event.what == "opened" else found
            continue
        job = event.attempt.job
        if event.what in ("submitted", "opened") and event.fields.get("executor") == "slurm":
            over.discard(job)
            elsewhere = here is not None and event.fields.get("cluster", here) != here
            found = None if elsewhere else job
        elif event.what == "ended" and event.fields.get("restart_allowed") is False:
            over.add(job)
    return None if found in over else found
