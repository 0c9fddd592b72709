"""The decision about an attempt when the run's file system fails: a full quota, a stale handle.

The next attempt records the end of this one in the event log, as after the loss of a node.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hpcrun.diagnose.read_log import scheduler_word
from hpcrun.errors import ClusterError, UserError
from hpcrun.job import policy as exitcodes
from hpcrun.job.history import all_histories, asked_to_end, jobs_of
from hpcrun.job.policy import Budgets, decide
from hpcrun.job.scheduler_view import batch_log
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import is_unfinished, read_heard_stops
from hpcrun.run.events import Attempt, Cause, Event, read_events
from hpcrun.run.files import read_json

_Found = TypeVar("_Found")

# Consecutive starts that could write nothing.
_SILENT = 3

_FINAL = {
    exitcodes.BAD_INPUT: "bad input; see the log of rank 0",
    exitcodes.SAVE_FAILED: "the last checkpoint was not written",
}


@dataclass(frozen=True)
class Outcome:
    """The reason in words, and the batch script's exit code; None: the job starts again."""

    code: int | None
    reason: str


def decide_unrecorded(
    run: RunDirectory, attempt: Attempt, exit_code: int, setup: str | None
) -> Outcome:
    """Decide from the readable files, and write nothing."""
    log = _read(lambda: read_events(run))
    events = log or []
    finished = (_read(lambda: read_json(run.result)) or {}).get("state") == "finished"
    word = "cancelled" if asked_to_end(events, attempt) else scheduler_word(batch_log(run, attempt))
    if word == "cancelled":
        return Outcome(exitcodes.TERMINATED, "cancelled: `hpcrun resume` continues it")
    mine = {event.what: event for event in events if event.attempt == attempt}
    script = "opened" in mine and mine["opened"].fields.get("script")
    folder = run.attempt_logs(attempt.job, attempt.restart)
    asked = _read(lambda: is_unfinished(folder)) or False
    stopped = "stopped" in mine or _read(lambda: bool(read_heard_stops(folder))) or False
    ended_well = script and exit_code == exitcodes.DONE and word is None and not asked
    done = ended_well and not stopped
    if finished or done or "finished" in mine:
        return Outcome(exitcodes.DONE, "the training is done")
    if "ended" in mine:
        # Only the consequences could not be written.
        fields = mine["ended"].fields
        code = None if fields.get("restart_allowed") else exit_code or exitcodes.FAILED
        return Outcome(code, str(fields.get("decision", "")))
    if exit_code in _FINAL and setup is None:
        return Outcome(exit_code, _FINAL[exit_code])
    # Without the event log it is unknown which starts could write.
    if log is not None and _silent_starts(log, attempt) >= _SILENT:
        return Outcome(
            exitcodes.FAILED,
            f"{_SILENT} consecutive attempts could write nothing to {run.path}: free some space there, then "
            f"`hpcrun resume {run.name}`",
        )
    cause = Cause.PREEMPTION if word or asked or stopped else Cause.CRASH
    ended = Event("ended", time.time(), attempt, cause.value, None, {})
    chain = jobs_of(events, attempt.job)
    own = [record for record in all_histories([*events, ended]) if record.attempt.job in chain]
    decision = decide(own, _budgets(run))
    code = None if decision.restart else exit_code or exitcodes.FAILED
    return Outcome(code, decision.reason)


def _read(read: Callable[[], _Found]) -> _Found | None:
    """Return the result of ``read``, or None after a file system error."""
    try:
        return read()
    except OSError:
        return None


def _silent_starts(events: Sequence[Event], attempt: Attempt) -> int:
    """Return the number of starts of this job since the newest in the event log, this start included."""
    opened = [
        event.attempt.restart
        for event in events
        if event.what == "opened" and event.attempt and event.attempt.job == attempt.job
    ]
    return attempt.restart - max(opened, default=-1)


def _budgets(run: RunDirectory) -> Budgets:
    from hpcrun.config import load_resolved

    try:
        return Budgets(**load_resolved(run.config).restarts.model_dump())
    except (OSError, UserError, ClusterError):
        return Budgets()
