"""The lines of the batch script's log that belong to one attempt, from every file that Slurm wrote."""

from pathlib import Path
from typing import Protocol

from hpcrun.diagnose.slurm_log import since
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, read_events


class Outputs(Protocol):
    """The files and the start of a job (see ``controller_view.JobView``)."""

    @property
    def outputs(self) -> tuple[Path, ...]:
        """The files of the batch script's output and errors."""

    @property
    def start_time(self) -> float | None:
        """The start of the newest attempt, in Unix seconds."""

    @property
    def restarts(self) -> int:
        """The number of times that the job was started again."""


def batch_log(run: RunDirectory, attempt: Attempt, job: Outputs | None = None) -> str:
    """Return the lines of ``attempt``: the output of the batch script, srun and slurmstepd.

    ``job.sbatch_args`` may send output and errors to other files than the run's own. Slurm reports these
    files as long as it knows the job.
    """
    return "\n".join(_of_attempt(run, path, attempt, job) for path in _files(run, attempt, job))


def has_batch_log(run: RunDirectory, attempt: Attempt, job: Outputs | None = None) -> bool:
    """Return True if there is a log in which Slurm's messages can appear."""
    return bool(_files(run, attempt, job))


def _files(run: RunDirectory, attempt: Attempt, job: Outputs | None) -> list[Path]:
    named = (*run.batch_logs(attempt.job), *(job.outputs if job else ()))
    found: list[Path] = []
    for path in named:
        try:
            known = any(path.samefile(other) for other in found)
            if path.is_file() and not known:
                found.append(path)
        except OSError:
            continue
    return found


def _of_attempt(run: RunDirectory, path: Path, attempt: Attempt, job: Outputs | None) -> str:
    """Return the lines of ``attempt``; only the output file has a mark at the attempt's start."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    _, found, mine = text.rpartition(f"hpcrun: attempt {attempt.owner} ")
    if found:
        return mine.partition(f"\nhpcrun: attempt {attempt.job}-")[0]
    if "hpcrun: attempt " in text or job is None:
        return ""
    start = _start(run, attempt, job)
    return "" if start is None else since(text, start)


def _start(run: RunDirectory, attempt: Attempt, job: Outputs) -> float | None:
    if job.restarts == attempt.restart and job.start_time is not None:
        return job.start_time
    mine = (event for event in read_events(run) if event.attempt == attempt)
    return next((event.time for event in mine if event.what == "opened"), None)
