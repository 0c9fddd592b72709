"""The submission of runs to this machine."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from hpcrun.config import Config
from hpcrun.errors import LaunchError
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import digest_of, make_numbered_folder, write_json
from hpcrun.run.trust import own_config
from hpcrun.slurm.local import job_files
from hpcrun.slurm.local.job_files import JobRequest, QueueLimits
from hpcrun.slurm.local.tasks import local_container, local_devices, visible_devices, worker


def submit_local(
    runs: Sequence[tuple[RunDirectory, Config]], queue: Path | None, at_once: int | None = None
) -> tuple[list[str], Callable[[], None]]:
    """Give the jobs of ``runs`` to this machine.

    Args:
        runs: the runs with their configs.
        queue: the folder of the queue that starts the jobs; None: there is one job, and it starts at once.
        at_once: jobs of the queue at the same time; None: as many as this machine can serve.

    Returns:
        The id of each job, and the function that lets the jobs begin, for the time when they are recorded. If
        this process ends before, the jobs are cancelled.

    Raises:
        LaunchError: the machine has fewer GPUs than a job asks for, or the process of the jobs does not
            start.
        OSError: the disk refuses.
    """
    requests = [local_request(run, config) for run, config in runs]
    ids = [request.job_id for request in requests]
    if queue is None:
        (only,) = requests
        return ids, start_job(only)
    devices = visible_devices() if any(request.devices for request in requests) else []
    limits = QueueLimits(at_once or _sane_limit(requests), devices)
    return ids, start_queue(queue, requests, limits)


def local_request(run: RunDirectory, config: Config) -> JobRequest:
    """Return the request for the job of ``run``, with a new folder; raises as :func:`submit_local`."""
    job, own = config.job, [sys.executable, "-m", "hpcrun"]
    container = local_container(run, job)
    devices = local_devices(config)
    folder = new_job_folder(run.logs)
    return JobRequest(
        job_id=folder.name,
        folder=str(folder),
        command=worker(run, job),
        # This machine always has room for the largest number.
        nodes=job.max_nodes,
        tasks_per_node=job.tasks_on_node,
        cpus_per_task=job.cpus_of_task,
        devices=devices,
        time_limit=job.time_seconds,
        signal_lead=float(job.signal_lead),
        warn_signal=config.warn_signal,
        grace=job.grace,
        requeue_delay=job.requeue_delay,
        setup=[*job.setup, *(container.setup if container else [])],
        node_setup=job.node_setup,
        preflight=[*own, "preflight", str(run.path), "--before-ranks"] if job.preflight else [],
        env={**(container.env if container else {}), **job.env},
        before=[sys.executable, "-m", "hpcrun.job.opening", str(run.path)],
        after=[*own, "finalize", str(run.path)],
        submitted=digest_of(own_config(run)),
    )


def _sane_limit(requests: Sequence[JobRequest]) -> int:
    """Return how many elements may run at a time: on the CPU, one task per core; GPUs have another limit."""
    if all(request.devices for request in requests):
        return len(requests)
    processes = max(it.nodes * it.tasks_per_node * (it.cpus_per_task or 1) for it in requests)
    return max(1, len(os.sched_getaffinity(0)) // processes)


_START_TIMEOUT = 20.0


def new_job_folder(parent: Path) -> Path:
    """Make the folder of a new job in ``parent``. Its name, the job's id, is a number that no other job has.

    Raises:
        OSError: the folder cannot be made.
    """
    return make_numbered_folder(parent, int(time.time()))


def start_job(request: JobRequest) -> Callable[[], None]:
    """Start the controller of a job; return the function that lets the job begin.

    Raises:
        LaunchError: the controller does not start.
        OSError: the disk refuses.
    """
    return _started(job_files.start_controller(request), request.controller_log, [request])


def start_queue(
    folder: Path, requests: Sequence[JobRequest], limits: QueueLimits
) -> Callable[[], None]:
    """Start the process that runs the jobs one after the other, as many at a time as ``limits`` allow.

    Args:
        folder: where the process keeps its list and its log.

    Returns:
        The function that lets the jobs begin.

    Raises:
        LaunchError: the process does not start.
        OSError: the disk refuses.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"local-{requests[0].job_id}-{os.getpid()}"
    path = folder / f"{name}.json"
    jobs = [asdict(request) for request in requests]
    write_json(path, {"limits": asdict(limits), "jobs": jobs})
    log = folder / f"{name}.log"
    return _started(job_files.start_process("queue", path, log), log, requests)


def _started(
    process: "subprocess.Popen[bytes]", log_file: Path, requests: Sequence[JobRequest]
) -> Callable[[], None]:
    """Wait until each job has a first state; return the function that lets the jobs begin."""
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
    return partial(job_files.release, process)
