"""A job that a scheduler has accepted, and its end before anything knows of it."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcrun import slurm
from hpcrun.errors import LaunchError
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.local import job_files

ExecutorName = Literal["slurm", "local", "debug", "prepared"]


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted job."""

    executor: ExecutorName
    job_id: str


def withdraw(run: RunDirectory, executor: str, job: str) -> bool:
    """End a job without a record: its submission was interrupted, or could not be recorded.

    Returns whether the job has ended.
    """
    if executor == "slurm":
        return slurm.run(slurm.scancel_command(job)).returncode == 0
    folder = run.job_logs(job)
    with contextlib.suppress(LaunchError):
        job_files.send(folder, job_files.KILL)
    deadline = time.monotonic() + 10.0
    # The queue is the process of a waiting job, and continues for the other jobs.
    while (status := job_files.read_status(folder)) is not None and job_files.is_alive(status):
        if status.state in job_files.ENDED:
            break
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def take_back(run: RunDirectory, handed: SubmittedJob, error: OSError) -> None:
    """End a job that could not be recorded in the event log; hpcrun could neither find nor stop it later.

    Raises:
        LaunchError: the job cannot be ended.
    """
    if not withdraw(run, handed.executor, handed.job_id):
        raise LaunchError(
            f"job {handed.job_id} is submitted, but {run.path} cannot be written ({error.strerror}); "
            f"end it with `scancel {handed.job_id}`"
        ) from error


def submitit_folder(run: RunDirectory) -> Path:
    """Return the folder of submitit's scripts and pickles; a task gets the run's path and reads no pickle."""
    return run.logs / "submitit"
