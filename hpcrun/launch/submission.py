"""From a run directory to a job: choose who runs it, and hand it over."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcrun.cluster import slurm
from hpcrun.cluster.avoided_nodes import (
    NodeRequest,
    nodes_to_avoid,
    take_back_if_stuck,
    with_options,
)
from hpcrun.cluster.environment import unused_by_sbatch
from hpcrun.cluster.hardware.devices import visible_gpus
from hpcrun.cluster.hostlist import expand
from hpcrun.cluster.slurm.options import given_option
from hpcrun.config import Config, Job
from hpcrun.launch import jobs
from hpcrun.launch.array import ArrayTasks
from hpcrun.launch.batch_script import BatchRequest, batch_script
from hpcrun.launch.dependencies import with_dependency
from hpcrun.launch.errors import LaunchError
from hpcrun.launch.resources import fitted, say
from hpcrun.launch.sbatch_options import job_name, wanted_cluster
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import record_event
from hpcrun.run.io.files import write_atomic

if TYPE_CHECKING:
    from hpcrun.launch.local.job_files import JobRequest
    from hpcrun.launch.slurm_executor import RequeueingSlurmExecutor

# sbatch's words when the request has certainly not arrived, so that asking again is safe.
_NOT_REACHED = "Unable to contact slurm controller (connect failure)"
_PATIENCE, _PAUSE = 120.0, 5.0
_NO_NODE_LEFT = ("Requested node configuration is not available", "Invalid node name specified")
# Options of srun and sbatch that say how many tasks there are, long and short.
_TASK_COUNTS = (
    ("ntasks-per-node", None),
    ("ntasks", "n"),
    ("nodes", "N"),
    ("ntasks-per-gpu", None),
    ("ntasks-per-socket", None),
    ("ntasks-per-core", None),
)

ExecutorName = Literal["slurm", "local", "debug", "prepared"]


@dataclass(frozen=True)
class Submitted:
    """A job that has been handed over; ``cluster``: which one has it, where sbatch said so."""

    executor: ExecutorName
    job_id: str
    cluster: str | None = None


def choose_executor(config: Config) -> ExecutorName:
    """Return the executor that the config names, or with ``auto`` Slurm where there is a Slurm.

    Raises:
        LaunchError: there are fewer GPUs than ranks, or the local cluster cannot do what is asked for.
    """
    wanted = config.job.executor
    if wanted == "auto":
        wanted = "slurm" if slurm.configured() else "local"
        if wanted == "local" and shutil.which("sbatch") is not None:
            say_aside(
                "hpcrun: Slurm is installed but not configured here; the job runs on this machine"
            )
    if wanted == "local":
        local_devices(config)
        _refuse_task_counts(config.job)
    return wanted


def local_devices(config: Config) -> list[str] | None:
    """The GPUs that a local job of ``config`` uses, node after node; None when it runs on the CPU.

    Raises:
        LaunchError: there are GPUs, but fewer than the job asks for.
    """
    available = visible_gpus(os.environ)
    if config.job.cpu or not available:
        return None
    wanted = config.job.nodes * config.job.gpus
    if available < wanted:
        raise LaunchError(
            f"{wanted} ranks, but this machine shows {available} GPUs: ask for at most {available} "
            "(--nodes 1 --gpus N), or train on the CPU with --cpu"
        )
    return visible_devices()[:wanted]


def visible_devices() -> list[str]:
    """Return the names of all GPUs that this process sees, as CUDA_VISIBLE_DEVICES has them."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named or [str(index) for index in range(visible_gpus(os.environ))]


def _refuse_task_counts(job: Job) -> None:
    """Refuse options that change the number of tasks: the local cluster has no srun.

    Raises:
        LaunchError: an option of srun's, or of sbatch's, says how many tasks there are.
    """
    for key in ("srun_args", "sbatch_args"):
        for option in getattr(job, key):
            if any(given_option([option], long, short) is not None for long, short in _TASK_COUNTS):
                raise LaunchError(
                    f"job.{key}: {option}: the local cluster has no srun; say it with --nodes, --gpus and "
                    "--tasks-per-node"
                )
    if job.srun_args:
        say_aside(
            f"hpcrun: job.srun_args: the local cluster has no srun and ignores {' '.join(job.srun_args)}"
        )


def batch_request(
    run: RunDirectory,
    config: Config,
    avoid: Sequence[str] = (),
    array: ArrayTasks | None = None,
) -> BatchRequest:
    """Return the parts of the Slurm script of ``run``, or of the ``array`` of the sweep in that folder.

    Args:
        avoid: nodes to exclude.
    """
    return BatchRequest(
        run=run.path,
        job=_leaving_out(config.job.model_copy(update={"warn_signal": config.warn_signal}), avoid),
        # Outside the container, on the batch host: it talks to Slurm.
        python=sys.executable,
        array=array,
    )


def fitted_to_slurm(config: Config) -> Config:
    """``config`` with the request for GPUs, CPUs and memory that suits this cluster, said on the screen.

    Raises:
        LaunchError: no node has what is asked for.
    """
    job, lines = fitted(config.job)
    say(lines)
    return config.model_copy(update={"job": job})


def _worker(run: RunDirectory, job: Job) -> list[str]:
    """Return the command of each task of the local cluster."""
    python = job.python or sys.executable
    return [*job.container, python, "-u", "-m", "hpcrun.worker", str(run.path)]


def _leaving_out(job: Job, nodes: Sequence[str]) -> Job:
    if not nodes:
        return job
    given = [job.exclude] if job.exclude else []
    return job.model_copy(update={"exclude": ",".join([*given, *nodes])})


def _bad_nodes(job: Job) -> list[str]:
    """Return the nodes that failed too often, and name them once on the screen.

    For a job on another cluster there are none: Slurm does not know that cluster's nodes here.
    """
    if wanted_cluster(job) is not None:
        return []
    fixed = bool(job.constraint or job.reservation)
    gpus = None if job.cpu else {"": job.gpus}
    excluded = frozenset(expand(job.exclude) if job.exclude else ())
    wanted = NodeRequest(job.partition, job.nodes, fixed, gpus, excluded)
    request = with_options(wanted, job.sbatch_args)
    bad = nodes_to_avoid(request, after=job.exclude_after, hours=job.exclude_hours)
    if bad:
        say_aside(
            f"hpcrun: leaves out {', '.join(bad)}: {job.exclude_after} failures or more in the last "
            f"{job.exclude_hours:g} h (job.exclude_after)"
        )
    return bad


def _say_what_sbatch_is_spared() -> None:
    unused = unused_by_sbatch(os.environ)
    if unused:
        inside = " (inside a job they may be that one's)" if "SLURM_JOB_ID" in os.environ else ""
        say_aside(
            f"hpcrun: not handed on to sbatch: {', '.join(unused)}{inside}; what the job needs of it "
            "goes into job.sbatch_args, or another key or flag"
        )


def preview(run: RunDirectory, config: Config, executor: ExecutorName) -> str:
    """Return what :func:`submit` would send: the batch script, or the local cluster's plan as comments."""
    if executor in ("slurm", "prepared"):
        if executor == "slurm":
            _say_what_sbatch_is_spared()
        return batch_script(batch_request(run, fitted_to_slurm(config), _bad_nodes(config.job)))
    request = batch_request(run, config)
    job = config.job
    lines = [
        f"# {executor}: {job.nodes} x {job.tasks_on_node} processes on this machine, each running",
        f"#   {' '.join(_worker(run, job))}",
        "# With Slurm, this script would go to sbatch:",
        "",
    ]
    return "\n".join(lines) + batch_script(request)


def submitit_folder(run: RunDirectory) -> Path:
    """Return the folder of submitit's pickles, which are never read: the tasks get the run's path."""
    return run.logs / "submitit"


def submit(
    run: RunDirectory,
    config: Config,
    executor: ExecutorName,
    after: Sequence[RunDirectory] = (),
    *,
    interrupted: Callable[[], bool] = lambda: False,
) -> Submitted:
    """Start a job for ``run`` and log it.

    Args:
        after: runs that have to finish first.
        interrupted: whether to stop asking a controller that does not answer.

    Raises:
        LaunchError: the scheduler refused, in its own words.
        OSError: the run directory cannot be written; no job is left.
        KeyboardInterrupt: ``interrupted`` said so; no job is left.
    """
    facts: dict[str, Any] = {"after": [str(other.path) for other in after]} if after else {}
    if executor == "slurm":
        # Asked first: the event has to follow the submission without a pause.
        if (cluster := slurm.cluster_name()) is not None:
            facts["cluster"] = cluster
        handed = _submit_slurm(run, with_dependency(config, after), interrupted)
        facts["name"] = job_name(run, config.job)
        if handed.cluster is not None:
            facts["cluster"] = handed.cluster
    else:
        handed = _submit_local(run, config, after)
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
    if not jobs.withdraw(run, handed.executor, handed.job_id, handed.cluster):
        where = f"--clusters={handed.cluster} " if handed.cluster else ""
        raise LaunchError(
            f"job {handed.job_id} is submitted, but {run.path} cannot be written ({error.strerror}); "
            f"end it with `scancel {where}{handed.job_id}`"
        ) from error


def submit_array(
    folder: RunDirectory, config: Config, array: ArrayTasks, interrupted: Callable[[], bool]
) -> Submitted:
    """Submit the elements ``array`` of the sweep in ``folder`` as one job array. No event is logged.

    Args:
        config: the config of any element, fitted to the cluster: all have the same ``job`` section.
        interrupted: returns True when to stop asking a controller that does not answer.

    Raises:
        LaunchError: the scheduler refused, in its own words.
        OSError: the folder cannot be written; no job is left.
        KeyboardInterrupt: ``interrupted`` said so; no job is left.
    """
    return _submit_slurm(folder, config, interrupted, array)


def _submit_slurm(
    run: RunDirectory,
    config: Config,
    interrupted: Callable[[], bool],
    array: ArrayTasks | None = None,
) -> Submitted:
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    if shutil.which("sbatch") is None:
        raise LaunchError(
            "job.executor is slurm, but there is no sbatch on PATH; log in to a submit host, or use "
            "--executor local"
        )
    _say_what_sbatch_is_spared()
    give_up = time.monotonic() + _PATIENCE
    # The elements of a sweep have been fitted once for all.
    wanted = fitted_with_patience(config, interrupted) if array is None else config
    bad = _bad_nodes(config.job)
    executor = _executor(run, wanted, bad, array)
    while True:
        try:
            job_id = str(executor.submit(str, run.path).job_id)
            if bad:
                _leave_enough_nodes(job_id, config.job)
            return Submitted("slurm", job_id, executor.cluster)
        except (FailedJobError, FailedSubmissionError) as error:
            words = " ".join(str(error).split())
            if bad and any(words_of_slurm in words for words_of_slurm in _NO_NODE_LEFT):
                say_aside("hpcrun: leaves out no node: Slurm has no other for the job")
                bad = []
                executor = _executor(run, wanted, bad, array)
                continue
            if _NOT_REACHED not in words or time.monotonic() > give_up:
                raise LaunchError(_refusal(words)) from error
        except OSError as error:
            if executor.accepted is not None:
                handed = Submitted("slurm", executor.accepted, executor.cluster)
                _take_back(run, handed, error)
            raise
        _wait_for_controller(interrupted)


def fitted_with_patience(config: Config, interrupted: Callable[[], bool]) -> Config:
    """Return ``config`` as :func:`fitted_to_slurm` does; wait some time for a controller that is away.

    Raises:
        LaunchError: no node has what is asked for.
        KeyboardInterrupt: ``interrupted`` said so.
    """
    give_up = time.monotonic() + _PATIENCE
    # Without an answer the request cannot be fitted to the nodes of the cluster.
    fits = not config.job.cpu and wanted_cluster(config.job) is None
    while fits and _is_away() and time.monotonic() < give_up:
        _wait_for_controller(interrupted)
    return fitted_to_slurm(config)


def _is_away() -> bool:
    """Return whether the controller of this host's cluster gives no answer."""
    answer = slurm.run(["scontrol", "show", "config"], timeout=6.0)
    return answer.returncode != 0 and slurm.classify_requeue_error(answer.stderr) == "transient"


def _wait_for_controller(interrupted: Callable[[], bool]) -> None:
    """Inform the user that the controller is away, and wait before the next attempt.

    Raises:
        KeyboardInterrupt: the user ended the wait; nothing was submitted.
    """
    say_aside(
        f"hpcrun: Slurm's controller does not answer; trying for {_PATIENCE:.0f} s "
        "(--executor local trains on this machine)"
    )
    again = time.monotonic() + _PAUSE
    while time.monotonic() < again:
        if interrupted():
            raise KeyboardInterrupt("nothing was submitted")
        time.sleep(0.1)


def _leave_enough_nodes(job_id: str, job: Job) -> None:
    """Take the exclusion of bad nodes back where Slurm finds no other node for the job."""
    reason = take_back_if_stuck(job_id, [job.exclude] if job.exclude else [])
    if reason is not None:
        say_aside(f"hpcrun: leaves out no node after all: the job waited for {reason}")


def _executor(
    run: RunDirectory, config: Config, avoid: Sequence[str], array: ArrayTasks | None
) -> "RequeueingSlurmExecutor":
    """Return the executor. Its script stays in the run: where no requeue is allowed, it is needed again."""
    from hpcrun.launch.slurm_executor import RequeueingSlurmExecutor

    request = batch_request(run, config, avoid, array)
    run.logs.mkdir(mode=0o700, exist_ok=True)
    write_atomic(run.batch_script, batch_script(request))
    return RequeueingSlurmExecutor(submitit_folder(run), request)


def _refusal(words: str) -> str:
    if "timed out" in words.lower():
        # The request may have arrived: a second one could start a second job.
        return (
            f"sbatch had no answer ({words}), and the job may be there or not; look with "
            "`squeue --me` before you submit again"
        )
    reason = words.replace("sbatch: error: ", "").replace("Batch job submission failed: ", "")
    return f"sbatch refused: {reason}; change the `job:` section or the flags, and see `sinfo`"


def _preflight(run: RunDirectory, job: Job) -> list[str]:
    """The command that checks this machine before the ranks of a local job, where the config wants it."""
    command = [sys.executable, "-m", "hpcrun", "preflight", str(run.path), "--before-ranks"]
    return command if job.preflight else []


def submit_local_sweep(
    folder: Path,
    runs: Sequence[tuple[RunDirectory, Config]],
    after: Sequence[RunDirectory],
    at_once: int | None,
) -> list[str]:
    """Give the elements of a sweep to this machine, ``at_once`` at a time; return the id of each job.

    Raises:
        LaunchError: the process that starts them does not begin.
        OSError: the disk refuses.
    """
    from hpcrun.launch.local.executor import start_queue
    from hpcrun.launch.local.job_files import JobRequest

    requests: list[JobRequest] = []
    for run, config in runs:
        _submit_local(run, config, after, start=requests.append)
    devices = visible_devices() if requests[0].devices is not None else []
    limit = at_once or _sane_limit(requests[0], len(devices))
    start_queue(folder, requests, limit, devices)
    return [request.job_id for request in requests]


def _sane_limit(request: "JobRequest", devices: int) -> int:
    """Return how many elements have GPUs of their own, or on the CPU a core for each process."""
    if request.devices:
        return max(1, devices // len(request.devices))
    processes = request.nodes * request.tasks_per_node * (request.cpus_per_task or 1)
    return max(1, (os.cpu_count() or 1) // processes)


def _submit_local(
    run: RunDirectory,
    config: Config,
    after: Sequence[RunDirectory],
    start: "Callable[[JobRequest], None] | None" = None,
) -> Submitted:
    from hpcrun.launch.local.executor import LocalClusterExecutor

    job = config.job
    executor = LocalClusterExecutor(submitit_folder(run), python=job.python)
    if start is not None:
        executor.start = start
    seconds = job.time_seconds
    executor.update_parameters(
        nodes=job.nodes,
        tasks_per_node=job.tasks_on_node,
        cpus_per_task=job.cpus_of_task,
        timeout_min=None if seconds is None else seconds / 60,
        devices=local_devices(config),
        signal_lead=float(job.signal_lead),
        warn_signal=config.warn_signal,
        grace=job.grace,
        requeue_delay=job.requeue_delay,
        setup=job.setup,
        node_setup=job.node_setup,
        preflight=_preflight(run, job),
        env=job.env,
        after=[sys.executable, "-m", "hpcrun", "finalize", str(run.path)],
        entry=_worker(run, job),
        log_folder=str(run.logs),
        wait_for=[str(other.path) for other in after],
    )
    return Submitted("local", str(executor.submit(str, run.path).job_id))
