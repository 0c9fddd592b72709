"""A run's history as spans and marks, from its event log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcrun.run.events import Attempt, Cause, Event

QUEUED, STARTING, RUNNING, LOST, WAITING = "queued", "starting", "running", "lost", "requeue wait"
SAVED, PREEMPTED, FAILED, FINISHED, STOPPED = "saved", "preempted", "failed", "finished", "stopped"
_OF_PREEMPTION = (Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.CONTINUED)


@dataclass(frozen=True)
class Span:
    """A state of a run from ``start`` to ``end``, in Unix seconds."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Mark:
    """A moment in the history of a run, in Unix seconds; ``cause``: of an end."""

    kind: str
    time: float
    cause: str = ""


@dataclass(frozen=True)
class Timeline:
    """The history of a run."""

    spans: Sequence[Span]
    marks: Sequence[Mark]

    @property
    def start(self) -> float | None:
        """The first moment, in Unix seconds; None for an empty history."""
        times = [span.start for span in self.spans] + [mark.time for mark in self.marks]
        return min(times, default=None)

    @property
    def end(self) -> float | None:
        """The last moment, in Unix seconds; None for an empty history."""
        times = [span.end for span in self.spans] + [mark.time for mark in self.marks]
        return max(times, default=None)


def timeline(events: Sequence[Event], until: float | None) -> Timeline:
    """Return the history up to ``until``, the last sign of life.

    ``lost`` is the time after the last save of an attempt that ended without stopping at a step:
    the next attempt computes these steps again. The work of a script is never lost, because its
    saves are unknown.
    """
    walk = _Walk()
    for event in events:
        walk.on(event)
    if until is not None:
        walk.go(until, walk.state)
    return Timeline(tuple(walk.spans), tuple(walk.marks))


class _Walk:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.marks: list[Mark] = []
        self.state: str | None = None
        self._at: float | None = None
        self._attempt: Attempt | None = None
        self._script = False

    def go(self, until: float, state: str | None) -> None:
        """Close the span that began at the last event."""
        if self._at is not None and state is not None and until > self._at:
            start = self._at
            # A save does not interrupt: ten thousand saves would be ten thousand spans.
            if self.spans and self.spans[-1].kind == state and self.spans[-1].end == start:
                start = self.spans.pop().start
            self.spans.append(Span(state, start, until))
        self._at = until if self._at is None else max(self._at, until)

    def on(self, event: Event) -> None:
        if event.what == "submitted":
            if self.state in (None, QUEUED):
                self.go(event.time, self.state)
                self.state = QUEUED
        elif event.what == "opened":
            if self.state == RUNNING:
                self._lose(event.time)
            self.go(event.time, self.state)
            self.state, self._attempt = STARTING, event.attempt
            self._script = bool(event.fields.get("script"))
        elif event.what == "cancelled" and self.state in (QUEUED, WAITING):
            self.go(event.time, self.state)
            self.state = None
            self.marks.append(Mark(STOPPED, event.time, "cancelled"))
        elif event.attempt == self._attempt and event.attempt is not None:
            self._in_attempt(event)

    def _in_attempt(self, event: Event) -> None:
        if event.what == "started":
            self.go(event.time, self.state)
            self.state = RUNNING
        elif event.what == "saved":
            self.go(event.time, self.state)
            self.marks.append(Mark(SAVED, event.time))
        elif event.what in ("stopped", "trained", "finished"):
            self.go(event.time, self.state)
            self.state = STARTING if self.state is not None else None
        elif event.what == "ended":
            self._ended(event)

    def _ended(self, event: Event) -> None:
        seen = float(event.fields.get("last_seen") or event.time)
        if self.state == RUNNING and event.cause != FINISHED:
            self._lose(seen)
        else:
            self.go(seen, self.state)
        again = bool(event.fields.get("restart_allowed"))
        self.state = WAITING if again else None
        self.marks.append(Mark(_mark_of(event.cause, again=again), seen, event.cause or "unknown"))

    def _lose(self, until: float) -> None:
        self.go(until, RUNNING if self._script else LOST)


def _mark_of(cause: str | None, *, again: bool) -> str:
    if cause == FINISHED:
        return FINISHED
    if cause in _OF_PREEMPTION:
        return PREEMPTED if again else STOPPED
    return STOPPED if cause == Cause.CANCELLED else FAILED
