"""The identity of an attempt: one start of the ranks of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

JOB_NAME = "HPCRUN_JOB_NAME"
"""Environment variable of the ranks with the name of the job: SLURM_JOB_NAME is the name of their step."""

IN_PLACE = "HPCRUN_IN_PLACE"
"""The environment variable with the number of a rank's attempt among those of the same start of its job."""

TASKS = "HPCRUN_TASKS"
"""The environment variable with the number of tasks that the step of the ranks has by the config."""


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks of a run: the job id, the restart count of the job, and the restarts in place.

    ``in_place``: number of restarts since the job's last start, each as a new step of the same allocation.
    """

    job: str
    restart: int
    in_place: int = 0

    @property
    def label(self) -> str:
        """The attempt's number within its job, such as ``1``, or ``1.2`` after two restarts in place."""
        return f"{self.restart}.{self.in_place}" if self.in_place else str(self.restart)

    @property
    def owner(self) -> str:
        """Name under which this attempt writes."""
        return f"{self.job}-{self.label}"

    @property
    def following(self) -> "Attempt":
        """The next attempt in the same allocation."""
        return replace(self, in_place=self.in_place + 1)

    def is_of_start(self, other: "Attempt") -> bool:
        """Return True if both belong to the same start of the same job."""
        return (self.job, self.restart) == (other.job, other.restart)

    def is_before(self, other: "Attempt") -> bool:
        """Return True if this is an earlier attempt of the same job."""
        mine, its = (self.restart, self.in_place), (other.restart, other.in_place)
        return self.job == other.job and mine < its


def attempt_here(job: str, environ: Mapping[str, str]) -> Attempt:
    """Return the attempt of ``job`` that the process with this environment belongs to."""
    restarts, in_place = environ.get("SLURM_RESTART_COUNT"), environ.get(IN_PLACE)
    return Attempt(job, int(restarts or 0), int(in_place or 0))


def other_tasks(environ: Mapping[str, str], started: int) -> str | None:
    """Return the problem if Slurm has started another number of tasks than the config says.

    An option of the site or the user may change the number; the ranks would then train other batches.

    Args:
        environ: that of a task; without `TASKS`, a person wrote the batch script and chose the number.
        started: tasks of the step.
    """
    wanted = environ.get(TASKS, "")
    if not wanted.isdecimal() or int(wanted) == started:
        return None
    return (
        f"job.nodes, job.gpus: the job has {started} task{'s' * (started != 1)}, the config says {wanted} "
        f"rank{'s' * (wanted != '1')}; remove what changes the number (an option of sbatch or srun, a "
        "SLURM_ variable in job.setup), or change these keys"
    )


def numbers_of(attempt: Attempt) -> dict[str, str | int]:
    """Return the attempt as keys of a line of the log."""
    in_place = {"in_place": attempt.in_place} if attempt.in_place else {}
    return {"job": attempt.job, "restart": attempt.restart, **in_place}


def number_columns(attempt: Attempt) -> dict[str, int]:
    """Return the attempt as columns of a line of metrics.jsonl."""
    in_place = {"in_place": attempt.in_place} if attempt.label != "0" else {}
    return {"restart": attempt.restart, **in_place}
