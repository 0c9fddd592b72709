"""Runs of a sweep that share one job: the end of one of them leaves the others as they are."""

from hpcrun.cluster import slurm
from hpcrun.launch.errors import LaunchError
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import read_events
from hpcrun.run.recent import Reader


def is_packed(run: RunDirectory, job: str, read: Reader = read_events) -> bool:
    """Return whether other runs share the job of ``run``."""
    return any(
        event.what == "submitted"
        and event.attempt is not None
        and event.attempt.job == job
        and "pack" in event.fields
        for event in read(run)
    )


def signal_ranks(run: RunDirectory, job: str, name: str, cluster: str | None) -> None:
    """Send the signal ``name`` to the ranks of ``run`` only.

    Raises:
        LaunchError: they have not started, or have ended.
    """
    listed = slurm.run(slurm.squeue_steps_command(job, cluster))
    steps = slurm.parse_steps(listed.stdout, run.path.name)
    sent = [
        slurm.run(slurm.scancel_command(job, signal=name, step=step, cluster=cluster))
        for step in steps
    ]
    if not any(answer.returncode == 0 for answer in sent):
        raise LaunchError(
            f"{run.name}: has no ranks in job {job} now; other runs share the job: try again, or cancel the "
            f"whole sweep with `hpcrun cancel {run.name.partition('/')[0]}`"
        )
