"""Runs of a sweep that share one job: the signals that end one of them without the others."""

from collections.abc import Sequence

from hpcrun import slurm
from hpcrun.errors import LaunchError
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import read_events
from hpcrun.run.last_lines import Reader


class SignalUnanswered(LaunchError):
    """Slurm did not answer, so the ranks may have received a signal or not."""


def is_packed(run: RunDirectory, job: str, read: Reader = read_events) -> bool:
    """Return True if other runs share the job of ``run``."""
    return any(
        event.what == "submitted"
        and event.attempt is not None
        and event.attempt.job == job
        and "pack" in event.fields
        for event in read(run)
    )


def steps_of(run: RunDirectory, job: str, cluster: str | None) -> list[int]:
    """Return the numbers of the steps with the ranks of ``run``.

    Raises:
        LaunchError: the ranks have not started, or have ended; or Slurm does not answer.
    """
    listed = slurm.run(slurm.squeue_steps_command(job, cluster))
    if listed.returncode != 0 and not slurm.is_unknown_job(listed):
        raise LaunchError(
            f"{run.name}: Slurm does not say whether its ranks run in job {job} "
            f"({' '.join(listed.stderr.split())}); nothing was done: try again later"
        )
    steps = slurm.parse_steps(listed.stdout, run.path.name)
    if not steps:
        raise LaunchError(
            f"{run.name}: has no ranks in job {job} now; other runs share the job: try again later, or "
            f"cancel the whole sweep with `hpcrun cancel {run.name.partition('/')[0]}`"
        )
    return steps


def signal_steps(job: str, steps: Sequence[int], name: str, cluster: str | None) -> None:
    """Send the signal ``name`` to ``steps`` of the job.

    Raises:
        SignalUnanswered: Slurm does not answer, so the ranks may have received the signal or not.
        LaunchError: Slurm refuses; the text has its message.
    """
    for step in steps:
        command = slurm.scancel_command(job, signal=name, step=step, cluster=cluster)
        answer = slurm.run(command)
        if answer.returncode == slurm.TIMED_OUT:
            raise SignalUnanswered(
                f"{answer.stderr}: the ranks may have received SIG{name} or not; run the same command again"
            )
        if answer.returncode != 0:
            raise LaunchError(f"{command[0]}: {' '.join(answer.stderr.split())}")
