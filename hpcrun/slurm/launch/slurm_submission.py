"""The submission of a run, or of an array of a sweep, to Slurm."""

import shutil
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcrun import slurm
from hpcrun.config import Config, Job, to_yaml
from hpcrun.errors import LaunchError, SubmissionUnanswered
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import write_atomic
from hpcrun.slurm.avoided_nodes import NodeRequest, nodes_to_avoid, with_options
from hpcrun.slurm.launch.batch_script import (
    ArrayTasks,
    batch_request,
    batch_script,
    submitted_digest,
)
from hpcrun.slurm.launch.resources import fitted, say
from hpcrun.slurm.launch.submitted import SubmittedJob, submitit_folder, take_back
from hpcrun.slurm.notation import expand

if TYPE_CHECKING:
    from hpcrun.slurm.launch.executor import RequeueingSlurmExecutor


def submit_slurm(
    run: RunDirectory, config: Config, array: ArrayTasks | None = None
) -> SubmittedJob:
    """Submit ``run``, or the ``array`` of the sweep in its folder. No event is logged.

    Args:
        config: that of the run, or that of any element fitted to the cluster: the elements of an array have
            the same ``job`` section.

    Raises:
        SubmissionUnanswered: sbatch got no answer, so the job may exist or not.
        LaunchError: the scheduler refused; the text has its message.
        OSError: the folder cannot be written; no job remains.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    if shutil.which("sbatch") is None:
        raise LaunchError(
            "job.executor is slurm, but there is no sbatch on PATH; log in to a submit host, or use "
            "--executor local"
        )
    # The caller has fitted the elements of a sweep to the cluster.
    wanted = fitted_to_slurm(config, submits=True) if array is None else config
    digest = submitted_digest(to_yaml(config)) if array is None else ""
    executor = _executor(run, wanted, bad_nodes(config.job), array, digest)
    try:
        return SubmittedJob("slurm", str(executor.submit(str, run.path).job_id))
    except (FailedJobError, FailedSubmissionError) as error:
        words = " ".join(str(error).split())
        if "timed out" in words.lower():
            # The request may have arrived: another request could start a second job.
            raise SubmissionUnanswered(
                f"sbatch got no answer ({words}), so the job may exist or not; check with "
                f"`squeue --me` before you submit again; the job would use {run.path}"
            ) from error
        executor.script.unlink(missing_ok=True)
        raise LaunchError(_refusal(error)) from error
    except OSError as error:
        if executor.accepted is not None:
            take_back(run, SubmittedJob("slurm", executor.accepted), error)
        raise


def fitted_to_slurm(config: Config, *, submits: bool = False) -> Config:
    """Return ``config`` with the request for GPUs, CPUs and memory that fits this cluster, and print it.

    Args:
        submits: a submission follows, so the controller must answer.

    Raises:
        LaunchError: no node has the requested resources, or the controller does not answer.
    """
    if submits and shutil.which("scontrol") is None:
        raise LaunchError(
            "scontrol is not on PATH, or may not be executed: hpcrun could not requeue the job; add the "
            "folder of Slurm's commands to PATH, as on a login host"
        )
    # Without an answer the request cannot be fitted to the nodes of the cluster.
    if submits and not config.job.cpu and _is_away():
        raise LaunchError(
            "Slurm's controller does not answer; submit again later, or train on this machine with "
            "--executor local"
        )
    job, lines = fitted(config.job)
    say(lines)
    return config.model_copy(update={"job": job})


def _is_away() -> bool:
    """Return True if the controller of this host's cluster gives no answer."""
    answer = slurm.run(["scontrol", "show", "config"], timeout=6.0)
    return answer.returncode != 0 and slurm.classify_requeue_error(answer.stderr) == "transient"


def bad_nodes(job: Job) -> list[str]:
    """Return the nodes that failed too often, and print their names."""
    fixed = bool(job.constraint or job.reservation)
    excluded = frozenset(expand(job.exclude) if job.exclude else ())
    wanted = NodeRequest(job.partition, job.min_nodes + job.spares, fixed, excluded)
    request = with_options(wanted, job.sbatch_args)
    bad = nodes_to_avoid(request, after=job.exclude_after, hours=job.exclude_hours)
    if bad:
        say_aside(
            f"hpcrun: excludes {', '.join(bad)}: {job.exclude_after} failures or more in the last "
            f"{job.exclude_hours:g} h (job.exclude_after)"
        )
    return bad


def _executor(
    run: RunDirectory,
    config: Config,
    avoid: Sequence[str],
    array: ArrayTasks | None,
    submitted: str,
) -> "RequeueingSlurmExecutor":
    """Return the executor. Its script stays in the run directory: a follow-up job may need it."""
    from hpcrun.slurm.launch.executor import RequeueingSlurmExecutor

    request = batch_request(run, config, avoid, array, submitted)
    run.logs.mkdir(mode=0o700, exist_ok=True)
    write_atomic(run.batch_script, batch_script(request))
    return RequeueingSlurmExecutor(submitit_folder(run), request)


def _refusal(error: Exception) -> str:
    cause = error.__cause__
    if not isinstance(cause, subprocess.CalledProcessError):
        reason = " ".join(str(error).split())
    else:
        answer = slurm.Completed(cause.returncode, str(cause.output or ""), str(cause.stderr or ""))
        if slurm.cannot_run(answer):
            return f"sbatch cannot run: {slurm.refusal_words(answer)}; check PATH and the version of Slurm"
        reason = slurm.refusal_words(answer) or f"exit code {cause.returncode}, without a reason"
    return f"sbatch refused: {reason}; {slurm.remedy_of_refusal(reason)}"
