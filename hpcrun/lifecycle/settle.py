"""The end of an attempt: find its cause, write it down, decide whether to start again.

It runs once per attempt, outside the training processes (in the batch script, or in the local
cluster's controller): a rank that was killed can decide nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcrun.diagnose.causes import Diagnosis, first_cause, scheduler_word
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.goodput import goodput
from hpcrun.lifecycle.history import Cause, last_committed, lives
from hpcrun.lifecycle.policy import Budgets, Decision, decide
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import read_exits, read_failures
from hpcrun.run.events import Attempt, Event, read_events, record_event
from hpcrun.run.files import read_json, write_json

SchedulerWord = Literal["preemption", "cancelled", "time-limit", "node-failure"]

_BY_SCHEDULER = {
    "preemption": Cause.PREEMPTION,
    "cancelled": Cause.CANCELLED,
    "time-limit": Cause.TIME_LIMIT,
    "node-failure": Cause.NODE_FAILURE,
}


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended and what follows.

    ``restart_by_scheduler``: the scheduler requeues it of its own accord, so nobody else may.
    """

    cause: Cause
    step: int | None
    line: str
    decision: Decision
    diagnosis: Diagnosis | None
    restart_by_scheduler: bool


def settle(
    run: RunDirectory,
    attempt: Attempt,
    exit_code: int,
    budgets: Budgets,
    *,
    scheduler: SchedulerWord | None = None,
    batch_log: str = "",
) -> Verdict:
    """Judge the attempt, append ``ended`` to the event log, and write result.json if this is the end.

    Args:
        exit_code: the highest of the tasks' exit codes, as srun returns it.
        scheduler: the scheduler's own word for why it ended the job, where it gave one.
        batch_log: what srun and slurmstepd printed.

    Raises:
        OSError: the run directory cannot be written.
    """
    events = read_events(run)
    folder = run.attempt_logs(attempt.job, attempt.restart)
    diagnosis = first_cause(read_failures(folder), read_exits(folder), batch_log)
    cause, line = judge(events, attempt, exit_code, scheduler, batch_log, diagnosis)
    step = last_committed(events)
    crashed = diagnosis if cause is Cause.CRASH else None
    ended = Event("ended", time.time(), attempt, cause.value, crashed.step if crashed else step, {})
    decision = decide(lives([*events, ended]), budgets)
    record_event(
        run,
        "ended",
        attempt=attempt,
        cause=cause.value,
        step=ended.step,
        exit_code=exit_code,
        reason=line,
        host=crashed.host if crashed else None,
        restart_allowed=decision.restart,
        decision=decision.reason,
    )
    if not decision.restart:
        if cause is not Cause.FINISHED:
            write_final_word(run, cause, line, decision.reason, step)
        _add_goodput(run)
    return Verdict(
        cause,
        step,
        line,
        decision,
        diagnosis,
        restart_by_scheduler=scheduler == "preemption" and decision.restart,
    )


def judge(
    events: Sequence[Event],
    attempt: Attempt,
    exit_code: int,
    scheduler: SchedulerWord | None,
    batch_log: str,
    diagnosis: Diagnosis | None,
) -> tuple[Cause, str]:
    """The cause of the attempt's end and one line about it; see :func:`settle` for the arguments."""
    mine = {event.what: event for event in events if event.attempt == attempt}
    if "finished" in mine:
        return Cause.FINISHED, "finished"
    stopped = mine.get("stopped")
    if exit_code == exitcodes.SAVE_FAILED or (stopped and not stopped.fields.get("committed")):
        why = mine["save-failed"].fields.get("reason") if "save-failed" in mine else None
        return Cause.SAVE_FAILED, f"the last checkpoint was not written: {why or 'see the log'}"
    if stopped:
        return _stopped(stopped, scheduler)
    if "refused" in mine:
        return Cause.EXHAUSTED, str(mine["refused"].fields.get("reason", "refused"))
    if exit_code == exitcodes.BAD_INPUT:
        why = mine["bad-input"].fields.get("reason") if "bad-input" in mine else None
        return Cause.BAD_INPUT, str(why or "bad input; the log says what")
    word = scheduler or scheduler_word(batch_log)
    if word in _BY_SCHEDULER:
        return _BY_SCHEDULER[word], f"{word}, before a checkpoint could be written"
    if diagnosis is not None:
        suffix = f" ({diagnosis.cascade} other ranks then failed)" if diagnosis.cascade else ""
        return Cause.CRASH, diagnosis.line + suffix
    return Cause.CRASH, f"exit code {exit_code}, and no rank left a word"


def _stopped(event: Event, scheduler: SchedulerWord | None) -> tuple[Cause, str]:
    if scheduler is not None:
        return _BY_SCHEDULER[scheduler], f"{scheduler}: stopped and saved at step {event.step}"
    if event.cause == "terminate":
        return Cause.CANCELLED, f"SIGTERM: stopped and saved at step {event.step}"
    if event.cause == "deadline":
        return Cause.TIME_LIMIT, f"time limit near: stopped and saved at step {event.step}"
    return Cause.PREEMPTION, f"SIGUSR2: stopped and saved at step {event.step}"


def write_final_word(
    run: RunDirectory, cause: Cause, line: str, reason: str, step: int | None
) -> None:
    """Write result.json for a run that ends without having finished; raises OSError."""
    state = "stopped" if cause is Cause.CANCELLED else "failed"
    write_json(
        run.result,
        {
            "state": state,
            "cause": cause.value,
            "step": step,
            "reason": f"{line}; {reason}" if line else reason,
            "time": round(time.time(), 3),
        },
    )


def _add_goodput(run: RunDirectory) -> None:
    """Put the account of the run's time into result.json, now that the last attempt is over."""
    result = read_json(run.result)
    if result is not None:
        write_json(
            run.result, {**result, "goodput": goodput(read_events(run), time.time()).as_record()}
        )


def read_batch_log(path: Path, marker: str) -> str:
    """The part of the batch log that belongs to this attempt: what follows its last ``marker`` line."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(marker)[2]
