"""A job that a scheduler has accepted, and its end before anything knows of it."""

import contextlib
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class JobOfRun:
    """The job of one run, or the task of an array. ``name``: its name in Slurm."""

    run: RunDirectory
    job: SubmittedJob
    name: str | None = None

    @property
    def whole(self) -> SubmittedJob:
        """The job; the tasks of an array count as one job."""
        return replace(self.job, job_id=self.job.job_id.partition("_")[0])

    @property
    def command_to_end(self) -> str:
        """The command with which a person ends the job, which hpcrun may not know."""
        if self.job.executor == "slurm":
            return f"scancel {self.whole.job_id}"
        return f"hpcrun cancel {shlex.quote(str(self.run.path))}"


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


def unrecorded(left: Sequence[JobOfRun], error: OSError) -> str:
    """Return a line for each job that cannot be ended, and that hpcrun could not find later."""
    return "\n".join(
        f"job {one.whole.job_id} is submitted, but {one.run.path} cannot be written ({error.strerror}); "
        f"end it with `{one.command_to_end}`"
        for one in left
    )


def submitit_folder(run: RunDirectory) -> Path:
    """Return the folder of submitit's scripts and pickles; a task gets the run's path and reads no pickle."""
    return run.logs / "submitit"
