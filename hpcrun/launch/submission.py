"""From a run directory to a job: choose who runs it, and hand it over."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcrun.cluster import slurm
from hpcrun.cluster.avoid import nodes_to_avoid
from hpcrun.cluster.devices import visible_gpus
from hpcrun.cluster.environment import unused_by_sbatch
from hpcrun.config import Config, Job
from hpcrun.launch import jobs
from hpcrun.launch.batch_script import BatchRequest, batch_script
from hpcrun.launch.dependencies import with_dependency
from hpcrun.launch.errors import LaunchError
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import record_event

# sbatch's words when the request has certainly not arrived, so that asking again is safe.
_NOT_REACHED = "Unable to contact slurm controller (connect failure)"
_PATIENCE, _PAUSE = 120.0, 5.0

ExecutorName = Literal["slurm", "local", "debug", "prepared"]


@dataclass(frozen=True)
class Submitted:
    """A job that has been handed over."""

    executor: ExecutorName
    job_id: str


def choose_executor(config: Config) -> ExecutorName:
    """Who runs the job: what the config says, or with ``auto`` Slurm where there is one.

    Raises:
        LaunchError: there are fewer GPUs than ranks.
    """
    wanted = config.job.executor
    if wanted == "auto":
        wanted = "slurm" if slurm.configured() else "local"
        if wanted == "local" and shutil.which("sbatch") is not None:
            print(
                "hpcrun: Slurm is installed here, and knows no cluster: the job runs on this machine",
                file=sys.stderr,
            )
    if wanted == "local":
        local_devices(config)
    return wanted


def local_devices(config: Config) -> list[str] | None:
    """The GPUs that a local job of ``config`` uses, one a rank; None when it runs on the CPU.

    Raises:
        LaunchError: there are GPUs, but fewer than ranks.
    """
    available = visible_gpus(os.environ)
    if config.job.cpu or not available:
        return None
    ranks = config.job.world_size
    if available < ranks:
        raise LaunchError(
            f"{ranks} ranks, but this machine shows {available} GPUs: ask for at most {available} "
            "(--nodes 1 --gpus N), or train on the CPU with --cpu"
        )
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (named or [str(index) for index in range(available)])[:ranks]


def batch_request(run: RunDirectory, config: Config, avoid: Sequence[str] = ()) -> BatchRequest:
    """What the Slurm script of ``run`` is made of; ``avoid``: nodes to leave out."""
    python = config.job.python or sys.executable
    container = config.job.container
    folder = str(submitit_folder(run))
    return BatchRequest(
        run=run.path,
        job=_leaving_out(config.job, avoid),
        # Outside the container, on the batch host: it talks to Slurm.
        python=sys.executable,
        worker=(*container, python, "-u", "-m", "hpcrun.worker", "--submitit", folder),
    )


def _leaving_out(job: Job, nodes: Sequence[str]) -> Job:
    if not nodes:
        return job
    given = [job.exclude] if job.exclude else []
    return job.model_copy(update={"exclude": ",".join([*given, *nodes])})


def _bad_nodes(job: Job) -> list[str]:
    """The nodes that failed too often of late, said once on the screen."""
    bad = nodes_to_avoid(job.partition, job.nodes, after=job.exclude_after, hours=job.exclude_hours)
    if bad:
        print(
            f"hpcrun: leaves out {', '.join(bad)}: {job.exclude_after} failures or more in the last "
            f"{job.exclude_hours:g} h (job.exclude_after)",
            file=sys.stderr,
        )
    return bad


def _say_what_sbatch_is_spared() -> None:
    unused = unused_by_sbatch(os.environ)
    if unused:
        inside = " (inside a job they may be that one's)" if "SLURM_JOB_ID" in os.environ else ""
        print(
            f"hpcrun: not handed on to sbatch: {', '.join(unused)}{inside}; what the job needs of it goes "
            "into job.sbatch_args, or a key or flag of its own",
            file=sys.stderr,
        )


def preview(run: RunDirectory, config: Config, executor: ExecutorName) -> str:
    """What :func:`submit` would send: the batch script, or the local cluster's plan as comments."""
    if executor in ("slurm", "prepared"):
        if executor == "slurm":
            _say_what_sbatch_is_spared()
        return batch_script(batch_request(run, config, _bad_nodes(config.job)))
    request = batch_request(run, config)
    job = config.job
    lines = [
        f"# {executor}: {job.nodes} x {job.gpus} processes on this machine, each running",
        f"#   {' '.join(request.worker)}",
        "# With Slurm, this script would go to sbatch:",
        "",
    ]
    return "\n".join(lines) + batch_script(request)


def submitit_folder(run: RunDirectory) -> Path:
    """Where submitit keeps its pickles: a path, and nothing that a restart needs, is in them."""
    return run.logs / "submitit"


def submit(
    run: RunDirectory,
    config: Config,
    executor: ExecutorName,
    payload: Any,
    after: Sequence[RunDirectory] = (),
    *,
    interrupted: Callable[[], bool] = lambda: False,
) -> Submitted:
    """Start a job for ``run`` and log it.

    Args:
        payload: the callable that each task runs, given the run's path.
        after: runs that have to finish first.
        interrupted: whether to stop asking a controller that does not answer.

    Raises:
        LaunchError: the scheduler refused, in its own words.
        OSError: the run directory cannot be written; no job is left.
        KeyboardInterrupt: ``interrupted`` said so; no job is left.
    """
    facts: dict[str, Any] = {"after": [str(other.path) for other in after]} if after else {}
    if executor == "slurm":
        # Before, because of a job that was handed over there has to be a line at once.
        if (cluster := slurm.cluster_name()) is not None:
            facts["cluster"] = cluster
        handed = _submit_slurm(run, with_dependency(config, after), payload, interrupted)
    else:
        handed = _submit_local(run, config, payload, after)
    try:
        record_event(
            run,
            "submitted",
            executor=handed.executor,
            job=handed.job_id,
            nodes=config.job.nodes,
            gpus=config.job.gpus,
            **facts,
        )
    except OSError as error:
        _take_back(run, handed, error)
        raise
    return handed


def _take_back(run: RunDirectory, handed: Submitted, error: OSError) -> None:
    """End a job that the event log does not know of, which could be neither found nor stopped.

    Raises:
        LaunchError: it cannot be ended either.
    """
    if not jobs.withdraw(run, handed.executor, handed.job_id):
        raise LaunchError(
            f"job {handed.job_id} is submitted, but {run.path} cannot be written ({error.strerror}); "
            f"end it with `scancel {handed.job_id}`"
        ) from error


def _submit_slurm(
    run: RunDirectory, config: Config, payload: Any, interrupted: Callable[[], bool]
) -> Submitted:
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    from hpcrun.launch.slurm_executor import RequeueingSlurmExecutor

    if shutil.which("sbatch") is None:
        raise LaunchError(
            "job.executor is slurm, but there is no sbatch on PATH; log in to a submit host, or use "
            "--executor local"
        )
    _say_what_sbatch_is_spared()
    executor = RequeueingSlurmExecutor(
        submitit_folder(run), batch_request(run, config, _bad_nodes(config.job))
    )
    give_up = time.monotonic() + _PATIENCE
    while True:
        try:
            return Submitted("slurm", str(executor.submit(payload).job_id))
        except (FailedJobError, FailedSubmissionError) as error:
            words = " ".join(str(error).split())
            if _NOT_REACHED not in words or time.monotonic() > give_up:
                raise LaunchError(_refusal(words)) from error
        except OSError as error:
            if executor.accepted is not None:
                _take_back(run, Submitted("slurm", executor.accepted), error)
            raise
        print(
            f"hpcrun: Slurm's controller does not answer; trying for {_PATIENCE:.0f} s "
            "(--executor local trains on this machine)",
            file=sys.stderr,
        )
        again = time.monotonic() + _PAUSE
        while time.monotonic() < again:
            if interrupted():
                raise KeyboardInterrupt("nothing was submitted")
            time.sleep(0.1)


def _refusal(words: str) -> str:
    if "timed out" in words.lower():
        # The request may have arrived: a second one could start a second job.
        return (
            f"sbatch had no answer ({words}), and the job may be there or not; look with "
            "`squeue --me` before you submit again"
        )
    told = words.replace("sbatch: error: ", "").replace("Batch job submission failed: ", "")
    return f"sbatch refused: {told}; change the `job:` section or the flags, and see `sinfo`"


def _submit_local(
    run: RunDirectory, config: Config, payload: Any, after: Sequence[RunDirectory]
) -> Submitted:
    from hpcrun.launch.local_executor import LocalClusterExecutor

    job = config.job
    executor = LocalClusterExecutor(submitit_folder(run), python=job.python)
    seconds = job.time_seconds
    executor.update_parameters(
        nodes=job.nodes,
        tasks_per_node=job.gpus,
        cpus_per_task=job.cpus_per_task,
        timeout_min=None if seconds is None else seconds / 60,
        devices=local_devices(config),
        signal_lead=float(job.signal_lead),
        grace=job.grace,
        requeue_delay=job.requeue_delay,
        setup=job.setup,
        env=job.env,
        after=[sys.executable, "-m", "hpcrun", "settle", str(run.path)],
        entry=list(batch_request(run, config).worker),
        log_folder=str(run.logs),
        wait_for=[str(other.path) for other in after],
    )
    return Submitted("local", str(executor.submit(payload).job_id))
