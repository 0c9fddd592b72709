"""A new job for a run, where Slurm does not requeue the old one."""

import os
from dataclasses import dataclass

from hpcrun.cluster import slurm
from hpcrun.cluster.environment import scrub
from hpcrun.cluster.errors import ClusterError
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, read_events, record_event

# Seconds; sbatch itself asks a silent controller for longer than other commands do.
_TIMEOUT = 60.0


@dataclass(frozen=True)
class Unsubmitted(Exception):
    """No new job continues the run; the text says why."""

    words: str

    def __str__(self) -> str:
        return self.words


def submit_successor(run: RunDirectory, attempt: Attempt) -> str:
    """Submit the run's own batch script once more, to start after this job's end; return the job's id.

    The event ``submitted`` names this job under ``continues``, so that the budgets continue to count.

    Raises:
        Unsubmitted: there is no script that can be submitted again, sbatch refuses, or the run directory
            cannot be written; no job is left then.
    """
    if not run.batch_script.is_file():
        raise Unsubmitted(
            f"{run.batch_script} is gone; `hpcrun resume {run.name}` continues the run"
        )
    command = [
        "sbatch",
        "--parsable",
        # The job ends on its own, with whatever exit code; --dependency here outranks the script's.
        f"--dependency=afterany:{attempt.job}",
        str(run.batch_script),
    ]
    answer = slurm.run(command, timeout=_TIMEOUT, environ=scrub(os.environ))
    if answer.returncode != 0:
        raise Unsubmitted(" ".join(answer.stderr.split()) or "sbatch gave no reason")
    try:
        job, cluster = slurm.parse_sbatch(answer.stdout)
    except ClusterError as error:
        raise Unsubmitted(str(error)) from error
    try:
        _record(run, attempt, job)
    except OSError as error:
        slurm.run(slurm.scancel_command(job, cluster=cluster))
        raise Unsubmitted(f"{run.events}: {error.strerror}") from error
    return job


def _record(run: RunDirectory, attempt: Attempt, job: str) -> None:
    before = [event for event in read_events(run) if event.what == "submitted"]
    facts = dict(before[-1].fields) if before else {"executor": "slurm"}
    record_event(
        run,
        "submitted",
        attempt=Attempt(job, 0),
        **facts | {"continues": attempt.job},
    )
