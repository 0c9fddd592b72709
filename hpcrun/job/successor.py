"""The follow-up job of a run, if Slurm does not requeue the old job."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from hpcrun import slurm
from hpcrun.errors import ClusterError
from hpcrun.job.retries import Clock, Retries
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, read_events, record_event
from hpcrun.slurm.environment import scrub

# Seconds; sbatch retries a controller that does not answer for longer than other commands.
_TIMEOUT = 60.0


@dataclass(frozen=True)
class ContinuationError(Exception):
    """No new job continues the run; the text has the reason."""

    words: str

    def __str__(self) -> str:
        return self.words


def submit_successor(
    run: RunDirectory,
    attempt: Attempt,
    failed: Callable[[str, str], None],
    *,
    until: float | None = None,
    clock: Clock | None = None,
) -> str:
    """Submit the run's own batch script once more, to start after this job's end; return the job's id.

    The event ``submitted`` names this job in its field ``continues``, so the budgets continue. A
    submission that fails is tried again as a requeue is.

    Args:
        failed: called with the kind of a failure and Slurm's words, as :class:`Retries` says.
        until: retry a controller that does not answer until then (Unix seconds); None: one try.
        clock: the time.

    Raises:
        ContinuationError: there is no script that can be submitted again, sbatch refuses, or the run
            directory cannot be written; no job is left then.
    """
    if not run.batch_script.is_file():
        raise ContinuationError(
            f"{run.batch_script} is gone; `hpcrun resume {run.name}` continues the run"
        )
    retries = Retries(failed, until, clock or Clock())
    submit = _submit
    while True:
        try:
            job, cluster = submit(run, attempt)
            break
        except ContinuationError as refusal:
            kind = slurm.classify_requeue_error(refusal.words)
            if not retries.again("transient" if kind == "transient" else "unknown", refusal.words):
                raise
            submit = _submit_unless_accepted
    try:
        _record(run, attempt, job)
    except OSError as error:
        slurm.run(slurm.scancel_command(job, cluster=cluster))
        raise ContinuationError(f"{run.events}: {error.strerror}") from error
    return job


def take_over_dependents(old: str, new: str) -> list[str]:
    """Let the jobs that wait for the success of job ``old`` wait for ``new``; return their ids.

    Slurm cancels a job that waits for the success of a job that fails (``hpcrun submit --after``).
    """
    moved = []
    listed = slurm.run(slurm.squeue_dependents_command())
    for waiting in slurm.parse_dependents(listed.stdout):
        if not waiting.waits_for("afterok", old):
            continue
        dependency = waiting.retargeted("afterok", old, new)
        changed = slurm.run(slurm.scontrol_depend_command(waiting.job, dependency))
        if changed.returncode == 0:
            moved.append(waiting.job)
            continue
        print(
            f"hpcrun: job {waiting.job} waits for job {old}, and Slurm cancels it: "
            f"{' '.join(changed.stderr.split())}; submit it again with --after",
            file=sys.stderr,
            flush=True,
        )
    return moved


def _submit(run: RunDirectory, attempt: Attempt) -> tuple[str, str | None]:
    """Call sbatch; return the new job's id, and its cluster if sbatch names the cluster."""
    command = [
        "sbatch",
        "--parsable",
        # afterany, because this job ends with any exit code; --dependency here overrides that of the script.
        f"--dependency={_condition(attempt)}",
        str(run.batch_script),
    ]
    answer = slurm.run(command, timeout=_TIMEOUT, environ=scrub(os.environ))
    if answer.returncode != 0:
        raise ContinuationError(" ".join(answer.stderr.split()) or "sbatch gave no reason")
    try:
        return slurm.parse_sbatch(answer.stdout)
    except ClusterError as error:
        raise ContinuationError(str(error)) from error


def _submit_unless_accepted(run: RunDirectory, attempt: Attempt) -> tuple[str, str | None]:
    """Submit after a failure, unless the controller has accepted the job and its answer was lost."""
    listed = slurm.run(slurm.squeue_dependents_command())
    if listed.returncode != 0:
        raise ContinuationError(" ".join(listed.stderr.split()) or "squeue gave no reason")
    kind, _, job = _condition(attempt).partition(":")
    for waiting in slurm.parse_dependents(listed.stdout):
        if waiting.waits_for(kind, job) and waiting.script == str(run.batch_script):
            return waiting.job, None
    return _submit(run, attempt)


def _condition(attempt: Attempt) -> str:
    return f"afterany:{attempt.job}"


def _record(run: RunDirectory, attempt: Attempt, job: str) -> None:
    before = [event for event in read_events(run) if event.what == "submitted"]
    facts = dict(before[-1].fields) if before else {"executor": "slurm"}
    # The new job has this run only.
    facts.pop("pack", None)
    record_event(
        run,
        "submitted",
        attempt=Attempt(job, 0),
        **facts | {"continues": attempt.job},
    )
