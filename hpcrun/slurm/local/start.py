"""The start of a job of the local cluster, or of a queue of jobs: processes that outlive this one."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from hpcrun.errors import LaunchError
from hpcrun.run.io.files import make_numbered_folder, write_json
from hpcrun.slurm.environment import scrub
from hpcrun.slurm.local import job_files
from hpcrun.slurm.local.job_files import BEGIN, JobRequest, QueueLimits

_START_TIMEOUT = 20.0


def new_job_folder(parent: Path) -> Path:
    """Make the folder of a new job in ``parent``. Its name, the job's id, is a number that no other job has.

    Raises:
        OSError: the folder cannot be made.
    """
    return make_numbered_folder(parent, int(time.time()))


def start_job(request: JobRequest) -> None:
    """Start the controller of a job.

    Raises:
        LaunchError: the controller does not begin.
        OSError: the disk refuses.
    """
    request.write()
    log = Path(request.folder) / "controller.log"
    words = [sys.executable, "-m", "hpcrun.slurm.local.controller", str(request.path)]
    _start(words, log, [request])


def start_queue(
    folder: Path, requests: Sequence[JobRequest], limits: QueueLimits
) -> Callable[[], None]:
    """Start the process that runs the jobs one after the other, as many at a time as ``limits`` allow.

    The process waits for the call of the returned function before its first job. If the calling process
    ends without the call, no job begins, and all jobs are cancelled: no file may name them.

    Args:
        folder: where the process keeps its list and its log.

    Raises:
        LaunchError: the process does not begin.
        OSError: the disk refuses.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"local-{requests[0].job_id}-{os.getpid()}"
    path = folder / f"{name}.json"
    jobs = [asdict(request) for request in requests]
    write_json(path, {"limits": asdict(limits), "jobs": jobs})
    words = [sys.executable, "-m", "hpcrun.slurm.local.queue", str(path)]
    queue = _start(words, folder / f"{name}.log", requests, stdin=subprocess.PIPE)

    def begin() -> None:
        assert queue.stdin is not None
        # A queue that has ended has cancelled its jobs.
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
