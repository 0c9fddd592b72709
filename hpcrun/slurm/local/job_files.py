"""A job of the local cluster as files in the run's logs, and the processes that work on it."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hpcrun.errors import LaunchError
from hpcrun.run.attempt import IN_PLACE, Attempt
from hpcrun.run.files import read_json, write_json
from hpcrun.run.trust import SUBMITTED, own_json
from hpcrun.slurm.environment import scrub

State = Literal["PENDING", "RUNNING", "COMPLETING", "COMPLETED", "FAILED", "CANCELLED"]

ENDED = ("COMPLETED", "FAILED", "CANCELLED")

# Signals to the controller, in place of scancel, `scancel --signal=KILL` and a preemption.
CANCEL, KILL, PREEMPT = signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1

WITHDRAWN = "withdrawn"
"""File that cancels a job that waits in a queue."""


@dataclass(frozen=True)
class JobRequest:
    """A request to the controller: ``nodes`` times ``tasks_per_node`` copies of ``command``.

    Times are in seconds. ``before`` runs before each attempt; exit code 2: the attempt may not begin, and its
    end follows. ``after`` runs at the end of each attempt with ``--exit-code`` and, if
    this cluster ended the attempt, ``--scheduler WHY``, or ``--limit-near`` after the warning of a time
    limit; its exit code 75 requests a requeue.
    ``warn_signal``: the signal of that warning and of a preemption, such as USR2.
    ``setup``: shell lines before each task's command; ``node_setup``: before the tasks, once per node;
    ``preflight``: the command that checks this machine after that.
    ``submitted``: the digest of the run's config; empty: not known.
    ``devices``: the GPUs to assign, an equal number to each node, or None for a CPU job.
    """

    job_id: str
    folder: str
    command: Sequence[str]
    nodes: int
    tasks_per_node: int
    cpus_per_task: int | None
    devices: Sequence[str] | None
    time_limit: float | None
    signal_lead: float
    grace: float
    requeue_delay: float
    setup: Sequence[str]
    env: dict[str, str]
    after: Sequence[str]
    before: Sequence[str] = ()
    node_setup: Sequence[str] = ()
    preflight: Sequence[str] = ()
    warn_signal: str = "USR2"
    submitted: str = ""

    def write(self) -> Path:
        """Write the request where the controller reads it; raises OSError if it cannot be written."""
        write_json(self.path, asdict(self))
        return self.path

    @property
    def run(self) -> Path:
        """The run directory, which has the folder of the job in its logs."""
        return Path(self.folder).parent.parent

    @property
    def path(self) -> Path:
        """The file of the request."""
        return Path(self.folder) / "request.json"

    @property
    def controller_log(self) -> Path:
        """The output of the controller."""
        return Path(self.folder) / "controller.log"

    @classmethod
    def read(cls, path: Path) -> "JobRequest":
        """Read the request that :meth:`write` wrote.

        Raises:
            LaunchError: there is none.
            ForeignRun: it belongs to another user: its commands would run as this user.
        """
        value = own_json(path)
        if value is None:
            raise LaunchError(f"{path}: is not the request of a job; submit the run again")
        return cls(**value)


@dataclass(frozen=True)
class QueueLimits:
    """The limits for the jobs of a queue.

    ``at_once``: jobs at the same time. ``devices``: the GPUs, each for one job at a time.
    """

    at_once: int
    devices: Sequence[str] = ()


@dataclass(frozen=True)
class JobStatus:
    """The controller's last state. ``pid`` and ``pid_created`` together identify its process.

    ``queued``: the job has no controller yet; the process is the queue that will start it.
    """

    job_id: str
    state: State
    restart: int
    pid: int
    pid_created: float
    tasks: Sequence[int]
    queued: bool = False


def write_status(folder: Path, status: JobStatus) -> None:
    """Replace the job's ``job.json``; raises OSError if it cannot be written."""
    write_json(folder / "job.json", asdict(status))


def read_status(folder: Path) -> JobStatus | None:
    """Return the job's last state; None before the first state is written, or if the file is damaged."""
    value: dict[str, Any] | None = read_json(folder / "job.json")
    try:
        return None if value is None else JobStatus(**value)
    except TypeError:
        return None


def start_controller(request: JobRequest) -> "subprocess.Popen[bytes]":
    """Start the controller of a job, which waits for :func:`release`; raises OSError if it cannot start."""
    return start_process("controller", request.write(), request.controller_log)


def start_process(module: str, file: Path, log_file: Path) -> "subprocess.Popen[bytes]":
    """Start a module of this package with ``file``, as a process that outlives this one."""
    with open(log_file, "ab", opener=private) as log:
        return subprocess.Popen(
            [sys.executable, "-m", f"hpcrun.slurm.local.{module}", str(file)],
            env=scrub(os.environ),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def private(path: str, flags: int) -> int:
    """Open a file, as the ``opener`` of open(), that only this user can read."""
    return os.open(path, flags, 0o600)


def release(process: "subprocess.Popen[bytes]") -> None:
    """Let the jobs of ``process`` begin; raises LaunchError if it has ended."""
    assert process.stdin is not None
    try:
        with process.stdin:
            process.stdin.write(b"\n")
    except OSError as error:
        raise LaunchError(
            f"the process of the local job has ended ({error.strerror}); see its log, and submit again"
        ) from error


def released(wait: float) -> bool | None:
    """Return True after :func:`release`, False if the submitter ended before, None after ``wait`` seconds."""
    return bool(os.read(0, 1)) if select.select([0], [], [], wait)[0] else None


def is_alive(status: JobStatus) -> bool:
    """Return True if the job's controller runs: same pid *and* same start time, because pids are reused."""
    import psutil

    try:
        process = psutil.Process(status.pid)
        created = process.create_time()
    except psutil.Error:
        return False
    return abs(created - status.pid_created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE


def has_tasks(status: JobStatus) -> bool:
    """Return True if a task of the job's last state may still run."""
    import psutil

    return not status.tasks or any(psutil.pid_exists(pid) for pid in status.tasks)


def send(folder: Path, number: signal.Signals) -> None:
    """Send CANCEL, KILL or PREEMPT to the job with the logs in ``folder``.

    Raises:
        LaunchError: the job is not running.
    """
    status = read_status(folder)
    if status is None or status.state in ENDED or not is_alive(status):
        raise LaunchError(f"job {folder.name}: is not running on this machine")
    if status.queued:
        # The process of a waiting job is the queue, which runs other jobs too. If the job's controller starts
        # just now, the controller looks for the file again.
        (folder / WITHDRAWN).touch()
        status = read_status(folder)
        if status is None or status.queued or status.state in ENDED:
            return
    os.kill(status.pid, number)


def is_withdrawn(folder: Path) -> bool:
    """Return True if a person cancelled the job while it waited in the queue."""
    return (folder / WITHDRAWN).exists()


def own_status(
    request: JobRequest, state: State, restart: int, tasks: Sequence[int], *, queued: bool = False
) -> JobStatus:
    """Return the status that the calling process writes: the controller of the job, or the queue."""
    import psutil

    return JobStatus(
        request.job_id,
        state,
        restart,
        os.getpid(),
        psutil.Process().create_time(),
        list(tasks),
        queued,
    )


def host_name(node: int) -> str:
    """Return the name of a node of the local cluster."""
    return f"local{node}"


def job_environment(request: JobRequest, attempt: Attempt) -> dict[str, str]:
    """Return the variables of the whole job (sbatch(1), "Output environment variables")."""
    tasks = request.nodes * request.tasks_per_node
    hosts = host_name(0) if request.nodes == 1 else f"local[0-{request.nodes - 1}]"
    layout = str(request.tasks_per_node)
    if request.nodes > 1:
        layout += f"(x{request.nodes})"
    environ = {
        "HPCRUN_LOCAL_CLUSTER": "1",
        "SLURM_JOB_ID": request.job_id,
        "SLURM_JOBID": request.job_id,
        "SLURM_CLUSTER_NAME": "local",
        "SLURM_JOB_NUM_NODES": str(request.nodes),
        "SLURM_NNODES": str(request.nodes),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NPROCS": str(tasks),
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_TASKS_PER_NODE": layout,
        "SLURM_SUBMIT_HOST": socket.gethostname(),
    }
    if attempt.restart:
        # Slurm leaves the variable unset in the first attempt.
        environ["SLURM_RESTART_COUNT"] = str(attempt.restart)
    if attempt.in_place:
        environ[IN_PLACE] = str(attempt.in_place)
    if request.submitted:
        environ[SUBMITTED] = request.submitted
    if request.cpus_per_task:
        environ["SLURM_CPUS_PER_TASK"] = str(request.cpus_per_task)
    return environ


def step_environment(request: JobRequest, rank: int) -> dict[str, str]:
    """Return the variables of one task (srun(1), "Output environment variables")."""
    node, local_rank = divmod(rank, request.tasks_per_node)
    shared = job_environment(request, Attempt(request.job_id, 0))
    environ = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NODELIST": shared["SLURM_JOB_NODELIST"],
        "SLURM_STEP_NUM_NODES": shared["SLURM_NNODES"],
        "SLURM_STEP_NUM_TASKS": shared["SLURM_NTASKS"],
        "SLURM_STEP_TASKS_PER_NODE": shared["SLURM_TASKS_PER_NODE"],
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "SLURMD_NODENAME": host_name(node),
    }
    if request.devices is not None:
        on_node = len(request.devices) // request.nodes
        mine = request.devices[node * on_node : (node + 1) * on_node]
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    return environ


def script_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a script in place of those of the task: names of nodes that resolve.

    A library may read the list of nodes itself, and connect to the first, as ``jax.distributed.initialize()``
    does (jax/_src/clusters/slurm_cluster.py). All of 127.0.0.0/8 is this machine.

    Args:
        environ: the variables of a task of this cluster, or of any other process, which needs no change.
    """
    if environ.get("HPCRUN_LOCAL_CLUSTER") != "1":
        return {}
    nodes = int(environ.get("SLURM_JOB_NUM_NODES", "1"))
    hosts = f"127.0.0.[1-{nodes}]" if nodes > 1 else "127.0.0.1"
    return {
        name: hosts for name in ("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST") if name in environ
    }
