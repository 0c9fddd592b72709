"""Breakdown of a run's time, computed from its event log.

Every moment since the first submission belongs to exactly one part, so the parts add up to the wall time.
Clusters are compared by the share of productive time (ETTR, effective training time ratio: Kokolis et al.,
"Revisiting reliability in large-scale machine learning research clusters", 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from hpcrun.run.events import Attempt, Event


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run's wall time.

    queue: from a submission to the first start of its job. start_up: processes start, restore and end.
    productive: computing steps that a checkpoint kept. checkpoint: writing checkpoints.
    recomputed: computing steps that were lost and are computed again. requeue_wait: between
    two attempts of a job. suspended: Slurm had stopped the processes to let another job run. idle: after an
    end, until the next submission.

    For a script, all running time counts as productive, because hpcrun cannot see how much of it was saved.
    """

    queue: float = 0.0
    start_up: float = 0.0
    productive: float = 0.0
    checkpoint: float = 0.0
    recomputed: float = 0.0
    requeue_wait: float = 0.0
    suspended: float = 0.0
    idle: float = 0.0

    @property
    def wall(self) -> float:
        """Seconds since the first submission."""
        # asdict copies deeply, which takes most of the time of a table of many runs.
        return float(sum(vars(self).values()))

    @property
    def ettr(self) -> float | None:
        """Productive share (0 to 1) of the time outside ``idle``; None if there is no such time."""
        wanted = self.wall - self.idle
        return self.productive / wanted if wanted > 0 else None

    def as_record(self) -> dict[str, float | None]:
        """Return the parts in seconds, their sum and the ratio, for JSON."""
        ratio = self.ettr
        parts = {name: round(value, 3) for name, value in vars(self).items()}
        return {**parts, "wall": round(self.wall, 3), "ettr": ratio and round(ratio, 4)}


def goodput(events: Sequence[Event], now: float) -> Goodput:
    """Split the time from the first event to the end of the run, or to ``now`` (Unix seconds).

    Several hosts with different clocks write the log: an event with a time before that of its
    predecessor counts as simultaneous.
    """
    account = _Account()
    for event in events:
        account.on(event)
    return account.closed(now)


class _Account:
    """Reads the log in order; ``_state`` names the part to which the time since ``_at`` belongs."""

    def __init__(self) -> None:
        self._parts = {field.name: 0.0 for field in fields(Goodput)}
        self._at: float | None = None
        self._state = "queue"
        self._attempt: Attempt | None = None
        self._script = False
        # Seconds since ``_at`` in which the job was suspended.
        self._suspended = 0.0
        # Time of another submission before the end of the last job was recorded.
        self._asked: float | None = None

    def on(self, event: Event) -> None:
        if self._at is None:
            self._at = event.time
        if event.what == "submitted":
            # A fast job may log its first event before its submitter does.
            if self._state in ("idle", "queue"):
                self._spend(event.time, self._state)
                self._state = "queue"
            else:
                self._asked = event.time
        elif event.what == "opened":
            self._asked = None
            self._spend(event.time, self._lost if self._state == "running" else self._state)
            self._state, self._attempt = "start_up", event.attempt
            self._script = bool(event.fields.get("script"))
        elif event.what == "cancelled" and self._state in ("queue", "requeue_wait"):
            # A cancelled job that was still waiting logs no end.
            self._spend(event.time, self._state)
            self._state = "idle"
        elif event.attempt != self._attempt:
            return
        elif event.what == "started":
            self._spend(event.time, "start_up")
            self._state = "running"
        elif event.what == "saved":
            seconds = float(event.fields.get("seconds", 0.0))
            self._spend(event.time - seconds, "productive")
            self._spend(event.time, "checkpoint")
        elif event.what == "suspended":
            # A later event shows which part the steps around the suspension belong to.
            self._suspended += float(event.fields.get("seconds", 0.0))
        elif event.what in ("stopped", "trained", "finished"):
            # After the last commit of an orderly end, nothing more is computed.
            ran = self._script and self._state == "running"
            self._spend(event.time, "productive" if ran else "start_up")
            self._state = "start_up"
        elif event.what == "ended":
            seen = float(event.fields.get("last_seen") or event.time)
            self._spend(seen, self._lost if self._state == "running" else "start_up")
            self._state = "requeue_wait" if event.fields.get("restart_allowed") else "idle"
            if self._state == "idle" and self._asked is not None and self._asked > seen:
                self._spend(self._asked, "idle")
                self._state = "queue"

    @property
    def _lost(self) -> str:
        """The part for the time since the last commit if the attempt died without a record."""
        return "productive" if self._script else "recomputed"

    def closed(self, now: float) -> Goodput:
        if self._at is not None and self._state != "idle":
            # Steps in progress count as kept until an event shows a loss.
            self._spend(now, "productive" if self._state == "running" else self._state)
        return Goodput(**self._parts)

    def _spend(self, until: float, part: str) -> None:
        assert self._at is not None
        if until > self._at:
            suspended = min(self._suspended, until - self._at)
            self._suspended -= suspended
            self._parts["suspended"] += suspended
            self._parts[part] += until - self._at - suspended
            self._at = until
