"""The beginning of an attempt: close the previous attempt, ask the policy, and take ownership."""

import os
import socket
from typing import Any

from hpcrun.diagnose.read_log import scheduler_word
from hpcrun.errors import UserError
from hpcrun.job.finalize import with_lost_announcement, write_result
from hpcrun.job.ownership import Occupied, require_free, require_own_number
from hpcrun.job.policy import Budgets, decide
from hpcrun.job.scheduler_view import batch_log
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import read_hang
from hpcrun.run.files import read_json, read_lines
from hpcrun.run.journal.events import (
    AttemptRefused,
    CancelRequested,
    Cause,
    Ended,
    Finished,
    Opened,
)
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.state import AttemptRecord, State
from hpcrun.run.record import claim


class Refused(UserError):
    """The restart policy allows this run no further attempt."""


def already_finished(run: RunDirectory, attempt: Attempt) -> bool:
    """Return True if an earlier start of this job has finished the run, so that all ranks exit with code 0.

    Each rank checks this before rank 0 opens the attempt; otherwise the other ranks would wait for rank 0.
    """
    if attempt.label == "0" or (read_json(run.result) or {}).get("state") != "finished":
        return False
    return Journal(run).read().finished_before(attempt)


def open_attempt(run: RunDirectory, attempt: Attempt, budgets: Budgets, **facts: Any) -> None:
    """Make ``attempt`` the run's owner and log that it begins. Called once, by rank 0.

    An earlier attempt without a recorded end lost its node, unless Slurm's messages in its batch log
    give another reason: the attempt itself could not record one.

    Raises:
        Occupied: another job has the run, or this job is cancelled.
        Refused: a budget is used up, and result.json says which; or this attempt was opened before.
        OSError: the run directory cannot be written.
    """
    journal = Journal(run)
    state = journal.read()
    if facts.get("executor") == "slurm":
        require_free(run, attempt, state)
        require_own_number(run, attempt, state)
        _require_new(run, attempt, state)
    before = state = with_lost_announcement(run, state)
    for record in before.attempts:
        if record.cause is None and record.attempt != attempt:
            cause, reason = _end_of(run, before, record, attempt)
            ended = Ended(
                attempt=record.attempt,
                cause=cause.value,
                step=record.committed,
                reason=reason,
                last_seen=_last_sign(run, before, record),
                # For another job, a person has requested the next start.
                restart_allowed=record.attempt.job in before.chain(attempt.job),
            )
            journal.append(ended)
            state = state.after(ended)
    # Another job is another submission by a person and starts with fresh budgets.
    chain = state.chain(attempt.job)
    history = [one for one in state.attempts_of_newest_job if one.attempt.job in chain]
    # After a start that finished, only the result is missing: this start writes it again.
    if history and history[-1].cause not in (None, Cause.FINISHED):
        decision = decide(history, budgets)
        if not decision.restart:
            refused = AttemptRefused(attempt=attempt, reason=decision.reason)
            journal.append(refused)
            state = state.after(refused)
            write_result(run, state, history[-1].cause, "", decision.reason, state.committed)
            raise Refused(f"{run.name}: not started again: {decision.reason}")
    claim(run, attempt)
    if not history:
        # The result of an earlier job: `submit` removes it, sbatch by hand does not.
        run.result.unlink(missing_ok=True)
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    place: dict[str, Any] = {"cluster": cluster} if cluster else {}
    step = os.environ.get("SLURM_STEP_ID", "")
    if facts.get("executor") == "slurm" and step.isdecimal():
        # For late_kills.py.
        place["slurm_step"] = int(step)
    reported: dict[str, Any] = {"host": socket.gethostname(), **place, **facts}
    journal.append(Opened(attempt=attempt, **reported))
    if attempt.in_place and journal.read().without_opening(attempt).was_cancelled(attempt.job):
        # The cancellation came while the batch step decided. The event above would hide it.
        journal.append(CancelRequested(attempt=attempt))
        raise Occupied(f"{run.name}: job {attempt.job} is cancelled")


def _require_new(run: RunDirectory, attempt: Attempt, state: State) -> None:
    """Raise Refused if an earlier srun of the same allocation (salloc) has opened this attempt.

    Files of that step (the rendezvous of the ranks, failures) would be mistaken for files of this step.
    """
    if state.has_opened(attempt):
        raise Refused(
            f"{run.name}: attempt {attempt.owner} has run before in this allocation; start the next attempt "
            f"with SLURM_RESTART_COUNT={attempt.restart + 1} in front of srun, or submit the run"
        )


def _end_of(
    run: RunDirectory, state: State, record: AttemptRecord, successor: Attempt
) -> tuple[Cause, str]:
    if state.newest(Finished, record.attempt):
        return Cause.FINISHED, "finished"
    word = scheduler_word(batch_log(run, record.attempt))
    words = ["preemption", "time-limit"]
    # A job that Slurm starts again was not cancelled.
    if record.attempt.job != successor.job:
        words.append("cancelled")
        word = "cancelled" if state.asked_to_end(record.attempt) else word
    if word in words:
        return Cause(word), f"{word}; killed before it could record its end"
    hang = read_hang(run.attempt_logs(record.attempt))
    if hang is not None:
        return Cause.HANG, hang.line
    return (
        Cause.NODE_FAILURE,
        "ended without an exit record: its node failed, or all its processes died together",
    )


def _last_sign(run: RunDirectory, state: State, record: AttemptRecord) -> float:
    """Return the last time (Unix seconds) at which an attempt without a recorded end was known to run."""
    reported = [event.time for event in state.of(record.attempt).events]
    logged = [
        line["time"]
        for line in read_lines(run.metrics)
        if line.get("restart") == record.attempt.restart and line.get("time", 0.0) >= record.started
    ]
    return float(max([record.started, *reported, *logged]))
