"""Cancel, kill or preempt a run's job, on any executor."""

from hpcrun import slurm
from hpcrun.config import load_resolved
from hpcrun.errors import LaunchError
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import CancelRequested, Preempted
from hpcrun.run.journal.journal import Journal
from hpcrun.slurm.launch.jobs import state
from hpcrun.slurm.launch.slurm_jobs import has_opened, kill_steps
from hpcrun.slurm.launch.submission import write_off
from hpcrun.slurm.local import job_files


def cancel(run: RunDirectory) -> str:
    """End the run's job as ``scancel`` does: SIGTERM, time to save, no restart; return a line about it.

    Raises:
        LaunchError: the run is not running, or the scheduler refused.
    """
    executor, job, waiting = _live_job(run)
    if executor == "local":
        job_files.send(run.job_logs(job), job_files.CANCEL)
    else:
        _checked(slurm.scancel_command(job))
        note_cancelled(run, job)
    if waiting:
        return f"job {job}: cancelled while it waited"
    if load_resolved(run.config).command:
        return f"job {job}: SIGTERM to the script"
    return f"job {job}: will save and stop after its current step"


def kill(run: RunDirectory) -> str:
    """End the run's job immediately, without a checkpoint. Returns a line about the action.

    A job on another cluster cannot be reached: it is written off, so that the run can continue here. So is a
    run that a person has started on another host.

    Raises:
        LaunchError: the run is not running, or the scheduler refused.
    """
    now = state(run)
    if now.job is not None and now.cluster is not None:
        note_cancelled(run, now.job)
        return (
            f"job {now.job} on cluster {now.cluster} is written off, but not ended: if it still runs "
            "there, it stops writing once another job has the run"
        )
    if now.live and now.executor == "direct" and (host := write_off(run)) is not None:
        return f"the attempt on {host} is written off; if it still runs there, it stops writing"
    executor, job, waiting = _live_job(run)
    if executor == "local":
        job_files.send(run.job_logs(job), job_files.KILL)
        return f"job {job}: killed"
    # Without ranks, the step belongs to a preflight: the batch script would continue and start the ranks.
    ranks = not waiting and has_opened(run, job)
    if ranks:
        # Recorded first: the batch step may start the next attempt before this program continues.
        note_cancelled(run, job)
    if not ranks or not kill_steps(job):
        _checked(slurm.scancel_command(job))
    if not ranks:
        note_cancelled(run, job)
    return f"job {job}: killed"


def preempt(run: RunDirectory) -> str:
    """Send the run's job the signal of a preemption. Returns a line about the action.

    The ranks get the warning signal, on the local cluster and on Slurm. A real preemption is possible only
    for Slurm itself; a task saves on the warning, and the job is requeued.

    Raises:
        LaunchError: the run is not running, or the scheduler refused.
    """
    executor, job, waiting = _live_job(run)
    if waiting:
        raise LaunchError(f"{run.name}: job {job} waits for its start; there is nothing to preempt")
    if state(run).word == "suspended":
        raise LaunchError(
            f"{run.name}: job {job} is suspended and receives no signal; wait until Slurm resumes it"
        )
    config = load_resolved(run.config)
    name = config.warn_signal
    # Recorded first: the ranks may end before this program continues.
    Journal(run).append(Preempted(attempt=_newest(run, job)))
    if executor == "local":
        job_files.send(run.job_logs(job), job_files.PREEMPT)
    else:
        _checked(slurm.scancel_command(job, signal=name))
    saves = "" if config.command else "saves and "
    return f"job {job}: SIG{name} to all ranks; it {saves}is requeued after their end"


def note_cancelled(run: RunDirectory, job: str) -> None:
    """Record the cancellation: Slurm's own record may be lost together with the batch script."""
    Journal(run).append(CancelRequested(attempt=_newest(run, job)))


def _live_job(run: RunDirectory) -> tuple[str, str, bool]:
    """Return the live job: executor, id, and whether it waits."""
    now = state(run)
    if not now.live or now.executor is None or now.job is None:
        raise LaunchError(f"{run.name}: is not running ({now.word}); nothing was done")
    if now.cluster is not None:
        raise LaunchError(
            f"{run.name}: job {now.job} is on cluster {now.cluster}, and this host belongs to "
            "another cluster; run the command there, or, if that cluster is gone for good, write "
            "the job off with `hpcrun cancel --now`"
        )
    if now.executor in ("debug", "direct"):
        gone = "; if that host is gone, write it off with `hpcrun cancel --now`"
        raise LaunchError(
            f"{run.name}: has no job ({now.job} runs {now.detail}); end it there with Ctrl-C"
            f"{gone if now.detail.startswith('on ') else ''}"
        )
    return now.executor, now.job, now.word == "pending"


def _newest(run: RunDirectory, job: str) -> Attempt:
    return Journal(run).read().newest_of_job(job)


def _checked(command: list[str]) -> None:
    done = slurm.run(command)
    if done.returncode != 0:
        raise LaunchError(f"{command[0]}: {' '.join(done.stderr.split())}")
