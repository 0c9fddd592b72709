"""The event log: the events of a run in order, with causes. Restart decisions read only this file."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any

from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.run.io.files import append_line, read_lines


class Cause(str, Enum):
    """The cause of an attempt's end."""

    FINISHED = "finished"
    PREEMPTION = "preemption"
    TIME_LIMIT = "time-limit"
    CONTINUED = "continued"
    NODE_FAILURE = "node-failure"
    CRASH = "crash"
    HANG = "hang"
    CANCELLED = "cancelled"
    BAD_INPUT = "bad-input"
    SAVE_FAILED = "save-failed"
    EXHAUSTED = "exhausted"


@dataclass(frozen=True)
class Attempt:
    """One start of a job: the job id and its restart count."""

    job: str
    restart: int

    @property
    def owner(self) -> str:
        """Name under which this attempt writes."""
        return f"{self.job}-{self.restart}"


@dataclass(frozen=True)
class Event:
    """A line of the log; ``time`` is in Unix seconds.

    Values of ``what``: submitted (by a person), opened and started (an attempt), saved (``found``: reported
    later because of a crash), save-failed, stopped (at an agreed step), nonfinite (gradients at a step),
    suspended (by Slurm, for ``seconds``; reported when it continues), trained (all steps are done),
    bad-input, refused, finished, ended (with its cause), requeue-failed, excluded (nodes that failed too
    often), cancelled (by a person, on Slurm), preempted (by a person), occupied (another job was ``refused``
    because the ``holder`` had the run), given-up (no job continues the run), notified and notify-failed (the
    outcome of a notification).
    """

    what: str
    time: float
    attempt: Attempt | None
    cause: str | None
    step: int | None
    fields: dict[str, Any]


def record_event(
    run: RunDirectory,
    what: str,
    *,
    attempt: Attempt | None = None,
    cause: str | None = None,
    step: int | None = None,
    **fields: Any,
) -> None:
    """Append an event durably. Never call this in a signal handler.

    Raises:
        OSError: the disk refused.
    """
    line: dict[str, Any] = {"time": round(time.time(), 3), "event": what}
    if attempt is not None:
        line |= {"job": attempt.job, "restart": attempt.restart}
    if cause is not None:
        line["cause"] = cause
    if step is not None:
        line["step"] = step
    append_line(run.events, line | fields, durable=True)


def note(run: RunDirectory, what: str, attempt: Attempt, **fields: Any) -> None:
    """Append as :func:`record_event`; on a full disk, report the loss of the event and continue."""
    try:
        record_event(run, what, attempt=attempt, **fields)
    except OSError as error:
        say_aside(f"hpcrun: event {what} is not written: {error}")


def read_events(run: RunDirectory) -> Sequence[Event]:
    """Return all valid events of the run, in the order of writing; damaged lines are skipped."""
    events = (to_event(line) for line in read_lines(run.events))
    return [event for event in events if event is not None]


def was_cancelled(events: Sequence[Event], job: str) -> bool:
    """Return True if the job was cancelled since it was submitted and last opened the run."""
    kinds = [
        event.what
        for event in events
        if event.attempt is not None and event.attempt.job == job
        if event.what in ("submitted", "opened", "cancelled", "cancel-failed")
    ]
    return kinds[-1:] == ["cancelled"]


def job_of_process(run: RunDirectory, pid: int) -> str:
    """Return a name for the job of an attempt without a scheduler, such as ``pid1234``.

    A second attempt in the same process is ``pid1234-2``, because an old name would bring back the failures
    of the earlier attempt. Process ids also repeat, in every container.
    """
    opened = {
        event.attempt.job for event in read_events(run) if event.what == "opened" and event.attempt
    }
    names = (f"pid{pid}" if number == 1 else f"pid{pid}-{number}" for number in count(1))
    return next(name for name in names if name not in opened and not run.job_logs(name).exists())


def to_event(line: dict[str, Any]) -> Event | None:
    """Return the event of a log line, or None if a value has the wrong type."""
    known = {"time", "event", "job", "restart", "cause", "step"}
    cause, step = line.get("cause"), line.get("step")
    if not isinstance(cause, str | None) or not isinstance(step, int | None):
        return None
    try:
        return Event(
            what=str(line["event"]),
            time=float(line.get("time", 0.0)),
            attempt=Attempt(str(line["job"]), int(line.get("restart", 0)))
            if "job" in line
            else None,
            cause=cause,
            step=step,
            fields={key: value for key, value in line.items() if key not in known},
        )
    except (KeyError, TypeError, ValueError):
        return None
