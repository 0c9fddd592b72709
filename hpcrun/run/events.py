"""The event log: what happened to a run, in order, and why. Decisions about restarts read only this."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.run.io.files import append_line, read_lines


@dataclass(frozen=True)
class Attempt:
    """One life of a job: a job id and the number of times it had been restarted."""

    job: str
    restart: int

    @property
    def owner(self) -> str:
        """The name under which this attempt writes."""
        return f"{self.job}-{self.restart}"


@dataclass(frozen=True)
class Event:
    """One line of the log; ``time`` is in Unix seconds.

    ``what``: submitted (by a person), opened and started (an attempt), saved (``found``: told after the
    crash that kept its maker from it), save-failed, stopped (at an agreed step), nonfinite (gradients
    at a step), suspended (by Slurm, for ``seconds``; told once it goes on), trained (no step is left to
    take), bad-input, refused, finished, ended (with its cause),
    requeue-failed, excluded (nodes that failed too often), cancelled (by a person, on Slurm), preempted (by
    a person), occupied (another job was ``refused``, because the ``holder`` had the run).
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
    """Append one event, durably. Never called inside a signal handler.

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
    """As :func:`record_event`, but a full disk costs the line, not the training."""
    try:
        record_event(run, what, attempt=attempt, **fields)
    except OSError as error:
        say_aside(f"hpcrun: event {what} is not written: {error}")


def read_events(run: RunDirectory) -> Sequence[Event]:
    """Every whole event of the run, in the order written; damaged lines are passed over."""
    events = (to_event(line) for line in read_lines(run.events))
    return [event for event in events if event is not None]


def was_cancelled(events: Sequence[Event], job: str) -> bool:
    """Return whether the job was cancelled since it was submitted and last opened the run."""
    told = [
        event.what
        for event in events
        if event.attempt is not None and event.attempt.job == job
        if event.what in ("submitted", "opened", "cancelled")
    ]
    return told[-1:] == ["cancelled"]


def job_of_process(run: RunDirectory, pid: int) -> str:
    """Return a name for the job of an attempt that no scheduler started, such as ``pid1234``.

    The second attempt in one process is ``pid1234-2``: a name that was used would bring back the failures
    of the earlier attempt. Numbers of processes also come back, in every container.
    """
    opened = {
        event.attempt.job for event in read_events(run) if event.what == "opened" and event.attempt
    }
    names = (f"pid{pid}" if number == 1 else f"pid{pid}-{number}" for number in count(1))
    return next(name for name in names if name not in opened and not run.job_logs(name).exists())


def to_event(line: dict[str, Any]) -> Event | None:
    """The event that a line of the log holds, or None where a value is not what it should be."""
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
