"""Refuse a job if another live job has the run: a second submission must not take the run over.

A newer attempt of the same job may take over, because Slurm starts it only after the first has released its
nodes. For another job, only Slurm knows.
"""

import os
from collections.abc import Sequence

from hpcrun.errors import UserError
from hpcrun.job.end.scheduler_view import query_job
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, Event, read_events, record_event
from hpcrun.run.io.files import make_folders
from hpcrun.slurm.job_states import is_over

# slurm.conf(5), MaxJobId: ids from here up belong to a federation and are equal on all of its clusters.
_FEDERATED = 1 << 26


class Occupied(UserError):
    """Another job has the run."""


def require_free(run: RunDirectory, attempt: Attempt) -> None:
    """Check that no other job of this cluster has the run or waits to continue it.

    The logged refusal belongs to no attempt, so it changes nothing for the other job.

    Raises:
        Occupied: another job does.
        OSError: the run directory cannot be written.
    """
    job = _job_before(read_events(run), attempt)
    view = query_job(job) if job is not None else None
    # A COMPLETING job has been asked to end, and its ranks will see the new owner.
    if view is None or is_over(view.state) or view.being_ended:
        return
    record_event(run, "occupied", refused=attempt.owner, holder=job)
    raise Occupied(_line(run, attempt, str(job)))


def require_own_number(run: RunDirectory, job: str) -> None:
    """Check that no job of another cluster has the same number, and so the same log folder.

    The folder belongs to the first cluster that starts such a job: a file in it contains the cluster's name.

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
    # A crash or a full disk leaves a file without a name.
    if there and there != here:
        raise Occupied(same_number(run, job, there))


def same_number(run: RunDirectory, job: str, cluster: str) -> str:
    """Return the message for a job with the number of another job of the run, on another cluster.

    A federation moves a job to a sibling cluster under the same number.
    """
    if job.isdecimal() and int(job) >= _FEDERATED:
        return (
            f"{run.name}: job {job} of a federation started on cluster {cluster}, and a run cannot move to "
            f"another cluster; continue with `hpcrun resume {run.name} job.cluster={cluster}`"
        )
    return (
        f"{run.name}: job {job} of cluster {cluster} already used this number, which names the log files; "
        "submit this job again to get another number"
    )


def refusal(run: RunDirectory, attempt: Attempt) -> str | None:
    """Return the message with which `require_free` has refused ``attempt``, or None."""
    for event in read_events(run):
        if event.what == "occupied" and event.fields.get("refused") == attempt.owner:
            return _line(run, attempt, str(event.fields.get("holder")))
    return None


def _line(run: RunDirectory, attempt: Attempt, holder: str) -> str:
    return (
        f"{run.name}: job {holder} already has this run; job {attempt.job} does not start; follow it "
        "with `hpcrun logs -f`, or end it with `hpcrun cancel` first"
    )


def _job_before(events: Sequence[Event], attempt: Attempt) -> str | None:
    """Return the last job of this cluster that held the run, unless it is over or the attempt's own job."""
    here, found = os.environ.get("SLURM_CLUSTER_NAME"), None
    over: set[str] = set()
    for event in events:
        if event.attempt is None:
            continue
        if event.attempt.job == attempt.job:
            # The attempt's own job has opened the run since.
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
