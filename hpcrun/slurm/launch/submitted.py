"""A job that was submitted to Slurm or to this machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcrun.errors import LaunchError
from hpcrun.run.directory import RunDirectory

ExecutorName = Literal["slurm", "local", "debug", "prepared"]


@dataclass(frozen=True)
class Submitted:
    """A submitted job; ``cluster``: its cluster, if sbatch printed it."""

    executor: ExecutorName
    job_id: str
    cluster: str | None = None


def take_back(run: RunDirectory, handed: Submitted, error: OSError) -> None:
    """End a job that could not be recorded in the event log; hpcrun could neither find nor stop it later.

    Raises:
        LaunchError: the job cannot be ended.
    """
    # Needed here only: a dry run asks no scheduler about jobs.
    from hpcrun.slurm.launch import stopping

    if not stopping.withdraw(run, handed.executor, handed.job_id, handed.cluster):
        where = f"--clusters={handed.cluster} " if handed.cluster else ""
        raise LaunchError(
            f"job {handed.job_id} is submitted, but {run.path} cannot be written ({error.strerror}); "
            f"end it with `scancel {where}{handed.job_id}`"
        ) from error


def submitit_folder(run: RunDirectory, first: str = "") -> Path:
    """Return the folder of submitit's scripts and pickles; a task gets the run's path and reads no pickle.

    Args:
        first: the first element of an array: the path of its script identifies the array.
    """
    return run.logs / "submitit" / first
