"""The end of an attempt: find its cause, write it down, decide whether to start again.

It runs once per attempt, outside the training processes (in the batch script, or in the local
cluster's controller): a rank that was killed can decide nothing.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from hpcrun.diagnose.causes import Diagnosis, first_cause, scheduler_word
from hpcrun.diagnose.launching import launch_failure, setup_failure
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.goodput import goodput
from hpcrun.lifecycle.history import Cause, all_lives, asked_to_end, last_committed
from hpcrun.lifecycle.policy import Budgets, Decision, decide
from hpcrun.run.commits import newest_commit
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import first_log, last_words, read_exits, read_failures, read_hang
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

    ``step``: the newest one committed. ``diagnosis``: the first failure, where there was one.
    """

    cause: Cause
    step: int | None
    line: str
    decision: Decision
    diagnosis: Diagnosis | None


def settle(
    run: RunDirectory,
    attempt: Attempt,
    exit_code: int,
    budgets: Budgets,
    *,
    scheduler: SchedulerWord | None = None,
    batch_log: str = "",
    limit_near: bool = False,
    nobody_asked: bool = False,
    setup: str | None = None,
) -> Verdict:
    """Judge the attempt, append ``ended`` to the event log, and write result.json if this is the end.

    Args:
        exit_code: the highest of the tasks' exit codes, as srun returns it.
        scheduler: the scheduler's own word for why it ended the job, where it gave one.
        batch_log: what srun and slurmstepd printed.
        limit_near: the job's time was nearly up, which is what a warning signal then meant.
        nobody_asked: to the scheduler the job runs on, so that a SIGTERM was no cancellation of it.
        setup: the command of the batch script that failed before there were ranks.

    Raises:
        OSError: the run directory cannot be written.
    """
    events = with_lost_announcement(run)
    folder = run.attempt_logs(attempt.job, attempt.restart)
    told = scheduler or scheduler_word(batch_log)
    unlaunched = None if told else _unlaunched(events, attempt, setup, batch_log, folder)
    if unlaunched is not None:
        # Of a program that never was a rank the code says nothing.
        exit_code = exitcodes.FAILED
    diagnosis = unlaunched or first_cause(
        read_failures(folder),
        read_exits(folder),
        batch_log,
        read_hang(folder),
        partial(last_words, folder),
    )
    cause, line = judge(
        events,
        attempt,
        exit_code,
        scheduler,
        batch_log,
        diagnosis,
        limit_near=limit_near,
        nobody_asked=nobody_asked,
    )
    step = last_committed(events)
    crashed = diagnosis if cause is Cause.CRASH else None
    ended = Event("ended", time.time(), attempt, cause.value, crashed.step if crashed else step, {})
    # Not those of the newest job in the log: this one may have failed before it wrote a word there.
    own = [life for life in all_lives([*events, ended]) if life.attempt.job == attempt.job]
    decision = decide(own, budgets)
    record_event(
        run,
        "ended",
        attempt=attempt,
        cause=cause.value,
        step=ended.step,
        exit_code=exit_code,
        reason=line,
        host=diagnosis.host if diagnosis and cause in (Cause.CRASH, Cause.HANG) else None,
        restart_allowed=decision.restart,
        decision=decision.reason,
    )
    opened = any(event.what == "opened" and event.attempt == attempt for event in events)
    done = (read_json(run.result) or {}).get("state") == "finished"
    # The result of a finished run is not taken back by a job that never worked on it.
    if not decision.restart and (opened or not done):
        if cause is not Cause.FINISHED:
            write_final_word(run, cause, line, decision.reason, step)
        elif not run.result.exists():
            # A script's: only here is it known that all of its ranks have ended well.
            write_json(run.result, {"state": "finished", "time": round(time.time(), 3)})
        _add_goodput(run)
    return Verdict(cause, step, line, decision, diagnosis)


def _unlaunched(
    events: Sequence[Event], attempt: Attempt, setup: str | None, batch_log: str, folder: Path
) -> Diagnosis | None:
    """Why no rank came so far as to open the attempt, where that is known."""
    if any(one.attempt == attempt for one in events if one.what not in ("submitted", "cancelled")):
        return None
    opened = [event.attempt for event in events if event.what == "opened" and event.attempt]
    worked = any(one.job == attempt.job for one in opened)
    if setup is not None:
        return setup_failure(setup, batch_log, worked=worked)
    return launch_failure(batch_log, first_log(folder), worked=worked)


def settle_by_hand(
    run: RunDirectory,
    attempt: Attempt,
    exit_code: int,
    scheduler: SchedulerWord | None = None,
) -> None:
    """As :func:`settle`, for an attempt that a person started and nobody starts again.

    Called by rank 0 itself: what other ranks come to after it is not seen.
    """
    events = read_events(run)
    if not any(event.what == "opened" and event.attempt == attempt for event in events):
        return
    events = with_lost_announcement(run)
    folder = run.attempt_logs(attempt.job, attempt.restart)
    diagnosis = first_cause(read_failures(folder), [], hang=read_hang(folder))
    cause, line = judge(events, attempt, exit_code, scheduler, "", diagnosis)
    step = last_committed(events)
    reason = "the training is done"
    if cause is not Cause.FINISHED:
        reason = "it was started by hand, and nobody starts it again: the same command continues it"
    record_event(
        run,
        "ended",
        attempt=attempt,
        cause=cause.value,
        step=diagnosis.step if diagnosis and cause is Cause.CRASH else step,
        exit_code=exit_code,
        reason=line,
        restart_allowed=False,
        decision=reason,
    )
    if cause is not Cause.FINISHED:
        orderly = (Cause.CANCELLED, Cause.PREEMPTION, Cause.TIME_LIMIT)
        write_final_word(run, cause, line, reason, step, orderly)
    elif not run.result.exists():
        write_json(run.result, {"state": "finished", "time": round(time.time(), 3)})
    _add_goodput(run)


def with_lost_announcement(run: RunDirectory) -> Sequence[Event]:
    """The run's events with the newest commit among them, whose maker may not have lived to announce it.

    Raises:
        OSError: the run directory cannot be read or written.
    """
    events = read_events(run)
    newest = newest_commit(run)
    if newest is None:
        return events
    made = [life for life in all_lives(events) if life.attempt.owner == newest.owner]
    if not made or newest.step <= (made[0].committed or 0):
        return events
    # Its own time: what was computed after it is lost.
    when = round(newest.time, 3)
    record_event(run, "saved", attempt=made[0].attempt, step=newest.step, time=when, found=True)
    return read_events(run)


def judge(
    events: Sequence[Event],
    attempt: Attempt,
    exit_code: int,
    scheduler: SchedulerWord | None,
    batch_log: str,
    diagnosis: Diagnosis | None,
    *,
    limit_near: bool = False,
    nobody_asked: bool = False,
) -> tuple[Cause, str]:
    """The cause of the attempt's end and one line about it; see :func:`settle` for the arguments.

    The events decide before the exit code: srun kills the other ranks as soon as one leaves with a
    code, so that the highest of them may be 137 for any end.
    """
    mine = {event.what: event for event in events if event.attempt == attempt}
    if "finished" in mine:
        return Cause.FINISHED, "finished"
    word = "cancelled" if asked_to_end(events, attempt) else scheduler or scheduler_word(batch_log)
    stopped = mine.get("stopped")
    script = "opened" in mine and mine["opened"].fields.get("script")
    # What Slurm was ending may have ended well because of it.
    if script and exit_code == exitcodes.DONE and not stopped and word is None:
        return Cause.FINISHED, "the script ended with exit code 0 on all ranks"
    if exit_code == exitcodes.SAVE_FAILED or (stopped and not stopped.fields.get("committed")):
        why = mine["save-failed"].fields.get("reason") if "save-failed" in mine else None
        return Cause.SAVE_FAILED, f"the last checkpoint was not written: {why or 'see the log'}"
    if stopped:
        return _stopped(stopped, word, limit_near, nobody_asked)
    if "refused" in mine:
        return Cause.EXHAUSTED, str(mine["refused"].fields.get("reason", "refused"))
    blamed = diagnosis.line if diagnosis is not None and diagnosis.bad_input else None
    if "bad-input" in mine or blamed or exit_code == exitcodes.BAD_INPUT:
        why = mine["bad-input"].fields.get("reason") if "bad-input" in mine else blamed
        return Cause.BAD_INPUT, str(why or "bad input; the log says what")
    if word in _BY_SCHEDULER:
        return _BY_SCHEDULER[word], f"{word}, before a checkpoint could be written"
    if diagnosis is not None and diagnosis.hang:
        return Cause.HANG, diagnosis.line
    if diagnosis is not None:
        others = "rank" if diagnosis.cascade == 1 else "ranks"
        suffix = f" ({diagnosis.cascade} other {others} then failed)" if diagnosis.cascade else ""
        return Cause.CRASH, diagnosis.line + suffix
    return Cause.CRASH, f"exit code {exit_code}, and no rank left a word"


def _stopped(
    event: Event, word: str | None, limit_near: bool, nobody_asked: bool
) -> tuple[Cause, str]:
    saved = f"stopped and saved at step {event.step}"
    if event.step is None:
        killed = event.fields.get("killed")
        saved = "the script died of the signal" if killed else "the script was told to stop"
    if word in _BY_SCHEDULER:
        return _BY_SCHEDULER[word], f"{word}: {saved}"
    if event.cause == "terminate" and nobody_asked:
        # Another step's end that came late, say: an srun ends its step by name, and so the next start's too.
        return Cause.CRASH, f"SIGTERM, though nobody has cancelled the job: {saved}"
    if event.cause == "terminate":
        return Cause.CANCELLED, f"SIGTERM: {saved}"
    if event.cause == "deadline" or limit_near:
        return Cause.TIME_LIMIT, f"time limit near: {saved}"
    return Cause.PREEMPTION, f"SIGUSR2: {saved}"


def write_final_word(
    run: RunDirectory,
    cause: Cause,
    line: str,
    reason: str,
    step: int | None,
    stops: Collection[Cause] = (Cause.CANCELLED,),
) -> None:
    """Write result.json for a run that ends without having finished; raises OSError.

    Args:
        stops: the causes that are no failure, and leave the run stopped.
    """
    state = "stopped" if cause in stops else "failed"
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


def batch_log(run: RunDirectory, attempt: Attempt) -> str:
    """The part of the batch script's log that belongs to ``attempt``, as the script marks its start."""
    try:
        text = (run.logs / f"batch-{attempt.job}.log").read_text(errors="replace")
    except OSError:
        return ""
    _, found, mine = text.rpartition(f"hpcrun: attempt {attempt.owner} ")
    return mine.partition(f"\nhpcrun: attempt {attempt.job}-")[0] if found else ""
