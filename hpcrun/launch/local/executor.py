"""The local cluster as a submitit executor: nodes x tasks processes on this machine.

submitit's own local executor refuses more than one node. This executor registers through submitit's plugin
mechanism (entry point group ``submitit``), so ``submitit.AutoExecutor(folder, cluster="localcluster")``
runs any function on it.
"""

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from submitit.core import core
from submitit.slurm.slurm import SlurmJobEnvironment

from hpcrun.cluster.environment import scrub
from hpcrun.launch.errors import LaunchError
from hpcrun.launch.local import job_files
from hpcrun.launch.local.job_files import BEGIN, JobRequest, Limits
from hpcrun.run.io.files import write_json

_START_TIMEOUT = 20.0


class LocalClusterInfoWatcher(core.InfoWatcher):
    """Answers submitit's questions about states from the jobs' own files."""

    def __init__(self) -> None:
        super().__init__(delay_s=1)
        self.folders: dict[str, Path] = {}

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return the state in Slurm's words; UNKNOWN for a job without a state file."""
        folder = self.folders.get(job_id)
        status = job_files.read_status(folder) if folder else None
        if status is None:
            return "UNKNOWN"
        if status.state not in job_files.ENDED and not job_files.is_alive(status):
            return "NODE_FAIL"
        return status.state

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, str]:
        """Return the state under submitit's key."""
        return {"State": self.get_state(job_id, mode)}


class LocalClusterJob(core.Job[Any]):
    """A job of the local cluster."""

    watcher = LocalClusterInfoWatcher()

    def cancel(self, check: bool = True) -> None:
        """Cancel like ``scancel``; raises LaunchError if ``check`` is set and the job is not running."""
        try:
            job_files.send(self.watcher.folders[self.job_id], job_files.CANCEL)
        except LaunchError:
            if check:
                raise

    def _interrupt(self, timeout: bool = False) -> None:
        number = job_files.WARN if timeout else job_files.PREEMPT
        job_files.send(self.watcher.folders[self.job_id], number)


class LocalClusterJobEnvironment(SlurmJobEnvironment):
    """The environment of a task of the local cluster: Slurm's variables, under this executor's name."""

    @classmethod
    def name(cls) -> str:
        """Return the name that SUBMITIT_EXECUTOR holds."""
        return "localcluster"

    def _requeue(self, countdown: int) -> None:
        # submitit requeues inside a signal handler; here the controller decides, from the exit code.
        sys.exit(75)


class LocalClusterExecutor(core.PicklingExecutor):
    """Runs submitit jobs on this machine as if on ``nodes`` nodes.

    Parameters are submitit's shared parameters (nodes, tasks_per_node, cpus_per_task, timeout_min) and those
    of :class:`JobRequest`; ``entry`` is the command that each task runs instead of submitit's.
    """

    job_class = LocalClusterJob
    _own: ClassVar[dict[str, Any]] = {
        "devices": None,
        "signal_lead": 90.0,
        "warn_signal": "USR2",
        "grace": 30.0,
        "requeue_delay": 1.0,
        "setup": (),
        "node_setup": (),
        "preflight": (),
        "env": {},
        "after": (),
        "entry": None,
        "log_folder": None,
        "wait_for": (),
    }

    def __init__(
        self,
        folder: str | Path,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        super().__init__(folder, max_num_timeout, max_pickle_size_gb)
        self.python = shlex.quote(sys.executable) if python is None else python
        self.start: Callable[[JobRequest], None] = _start_controller

    @classmethod
    def name(cls) -> str:
        """Return the name under which AutoExecutor finds this executor."""
        return "localcluster"

    @classmethod
    def affinity(cls) -> int:
        """Return 0: AutoExecutor chooses this executor only by name."""
        return 0

    @classmethod
    def _equivalence_dict(cls) -> core.EquivalenceDict | None:
        return None

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return set(cls._own)

    def _num_tasks(self) -> int:
        return int(self.parameters.get("nodes", 1)) * int(self.parameters.get("tasks_per_node", 1))

    @property
    def _submitit_command_str(self) -> str:
        return f"{self.python} -u -m submitit.core._submit {shlex.quote(str(self.folder))}"

    def _submit_command(self, command: str) -> LocalClusterJob:
        wanted = {**self._own, **self.parameters}
        parent = Path(wanted["log_folder"] or self.folder)
        job_id, folder = _new_job_folder(parent)
        minutes = wanted.get("timeout_min")
        request = JobRequest(
            job_id=job_id,
            folder=str(folder),
            command=wanted["entry"] or shlex.split(command),
            nodes=wanted.get("nodes", 1),
            tasks_per_node=wanted.get("tasks_per_node", 1),
            cpus_per_task=wanted.get("cpus_per_task"),
            devices=wanted["devices"],
            time_limit=None if minutes is None else minutes * 60.0,
            signal_lead=wanted["signal_lead"],
            warn_signal=wanted["warn_signal"],
            grace=wanted["grace"],
            requeue_delay=wanted["requeue_delay"],
            setup=list(wanted["setup"]),
            node_setup=list(wanted["node_setup"]),
            preflight=list(wanted["preflight"]),
            env=dict(wanted["env"]),
            after=list(wanted["after"]),
            wait_for=list(wanted["wait_for"]),
        )
        self.start(request)
        tasks = list(range(self._num_tasks()))
        LocalClusterJob.watcher.folders[job_id] = folder
        return LocalClusterJob(folder=self.folder, job_id=job_id, tasks=tasks)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return ""

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return []

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return string.decode() if isinstance(string, bytes) else string


def _new_job_folder(parent: Path) -> tuple[str, Path]:
    """Return a new job id for this folder; the creation of the folder reserves it."""
    number = int(time.time())
    while True:
        folder = parent / str(number)
        try:
            folder.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            number += 1
            continue
        return str(number), folder


def _start_controller(request: JobRequest) -> None:
    request.write()
    log = Path(request.folder) / "controller.log"
    words = [sys.executable, "-m", "hpcrun.launch.local.controller", str(request.path)]
    _start(words, log, [request])


def start_queue(folder: Path, requests: Sequence[JobRequest], limits: Limits) -> Callable[[], None]:
    """Start the process that runs the jobs one after the other, as many at a time as ``limits`` allow.

    The process starts the first job after the caller has called the returned function. If the caller ends
    without that call, no job begins, and all jobs are cancelled, because they may not be recorded.

    Args:
        folder: where the process keeps its list and its log.

    Raises:
        LaunchError: the process does not start.
        OSError: the disk refuses.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"local-{requests[0].job_id}-{os.getpid()}"
    path = folder / f"{name}.json"
    jobs = [asdict(request) for request in requests]
    write_json(path, {"limits": asdict(limits), "jobs": jobs})
    words = [sys.executable, "-m", "hpcrun.launch.local.queue", str(path)]
    queue = _start(words, folder / f"{name}.log", requests, stdin=subprocess.PIPE)

    def begin() -> None:
        assert queue.stdin is not None
        # A queue cancels its jobs at its end.
        with contextlib.suppress(BrokenPipeError), queue.stdin as pipe:
            pipe.write(BEGIN)

    return begin


def _start(
    words: Sequence[str],
    log_file: Path,
    requests: Sequence[JobRequest],
    stdin: int = subprocess.DEVNULL,
) -> "subprocess.Popen[bytes]":
    """Start a process that outlives this one, and wait until each job has a first state."""
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            words,
            env=scrub(os.environ),
            stdin=stdin,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + _START_TIMEOUT + 0.1 * len(requests)
    for request in requests:
        while job_files.read_status(Path(request.folder)) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                words_left = log_file.read_text(errors="replace").strip().splitlines()
                raise LaunchError(
                    f"the local cluster did not start job {request.job_id}: "
                    f"{words_left[-1] if words_left else 'its controller printed nothing'}; check the "
                    "free space and the processes of this machine"
                )
            time.sleep(0.02)
    return process
