"""The time of a run, split into parts by its event log.

Every moment since the first submission belongs to exactly one part, so the parts add up to the wall time.
Clusters are compared by the share of productive time (ETTR, effective training time ratio: Kokolis et al.,
"Revisiting reliability in large-scale machine learning research clusters", 2024).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hpcrun.run.attempt import Attempt
from hpcrun.run.journal.events import (
    CancelRequested,
    Cause,
    Ended,
    Event,
    Finished,
    Opened,
    Saved,
    Started,
    Stepped,
    Stopped,
    Submitted,
    Suspended,
    Trained,
)
from hpcrun.run.journal.state import State


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run's wall time.

    queue: from a submission to the first start of its job. start_up: processes start, restore and end; also
    the whole time between two attempts in one allocation.
    productive: computing steps that a checkpoint kept, or that a finished run ended with. unsaved: computing
    steps of a live run since its newest checkpoint. stalled: no step came. running: a script that has
    reported no step computed, or waited. checkpoint: writing checkpoints.
    recomputed: computing steps that were lost and are computed again. requeue_wait: between
    two starts of a job. suspended: Slurm had stopped the processes to let another job run. idle: after an
    end, until the next submission.

    ``known``: false for a script that has reported no step, so that its saves are unknown.
    """

    queue: float = 0.0
    start_up: float = 0.0
    productive: float = 0.0
    unsaved: float = 0.0
    stalled: float = 0.0
    running: float = 0.0
    checkpoint: float = 0.0
    recomputed: float = 0.0
    requeue_wait: float = 0.0
    suspended: float = 0.0
    idle: float = 0.0
    known: bool = True

    @property
    def wall(self) -> float:
        """Seconds since the first submission."""
        return sum(self._parts().values())

    @property
    def wanted(self) -> float:
        """Denominator of the productive share: an event still decides about ``unsaved``."""
        return self.wall - self.idle - self.unsaved

    @property
    def ettr(self) -> float | None:
        """Productive share (0 to 1) of ``wanted``; None as long as no work can have been kept or lost."""
        computed = self.productive + self.checkpoint + self.recomputed + self.stalled
        begun = computed or (self.start_up and not self.unsaved)
        if not self.known or not begun:
            return None
        return self.productive / self.wanted

    def as_record(self) -> dict[str, float | None]:
        """Return the parts in seconds, their sum and the ratio, for JSON."""
        ratio = self.ettr
        parts = {name: round(value, 3) for name, value in self._parts().items()}
        return {**parts, "wall": round(self.wall, 3), "ettr": ratio and round(ratio, 4)}

    def _parts(self) -> dict[str, float]:
        # asdict copies deeply, which takes most of the time of a table of many runs.
        return {name: value for name, value in vars(self).items() if name != "known"}


class Span(NamedTuple):
    """A time from ``begin`` to ``end`` (Unix seconds) that belongs to one part of :class:`Goodput`."""

    part: str
    begin: float
    end: float


def goodput(
    state: State, now: float, stepped: float | None = None, *, lost: bool = False
) -> Goodput:
    """Split the time from the first event to the end of the run, or to ``now``.

    Args:
        state: the state of the run.
        now: the present, or the last sign of a run without a job, in Unix seconds of the writers' clock.
        stepped: the time of the last step of a live run that makes no progress; None: it makes progress.
        lost: no job has the run, though no event shows its end.
    """
    parts: dict[str, float] = {}
    for span in spans(state, now, stepped, lost=lost):
        parts[span.part] = parts.get(span.part, 0.0) + span.end - span.begin
    known = not state.of_script or any(state.of_kind(*_REPORTS))
    return Goodput(**parts, known=known)


def spans(
    state: State, now: float, stepped: float | None = None, *, lost: bool = False
) -> list[Span]:
    """Return the time from the first event to the end of the run, or to ``now``, in order without gaps.

    Several hosts with different clocks write the log: an event with a time before that of its
    predecessor counts as simultaneous. After a large difference, the later clock counts.
    """
    account = _Account(
        {event.attempt: type(event) for event in reversed([*state.of_kind(*_REPORTS)])}
    )
    for event in state.events:
        account.on(event)
    return account.closed(now, stepped, lost=lost)


_REPORTS: tuple[type[Event], ...] = (Stepped, Saved)
# Seconds. Clocks that NTP keeps differ by less.
_CLOCKS_DIFFER = 60.0


class _Account:
    """Reads the log in order; ``_state`` names the part to which the time since ``_at`` belongs."""

    def __init__(self, reports: Mapping[Attempt | None, type[Event]]) -> None:
        """``reports``: the kind of each attempt's first report."""
        self._spans: list[Span] = []
        # The first span after the last commit, and the first after the last start of the training.
        self._uncommitted, self._begun = 0, 0
        self._at: float | None = None
        # Seconds by which the present writer's clock is behind that of an earlier event.
        self._behind = 0.0
        self._state = "queue"
        self._attempt: Attempt | None = None
        self._script, self._reports = False, reports
        # The step of each save, and the first span after the save.
        self._saves: list[tuple[int, int]] = []
        # Seconds since ``_at`` in which the job was suspended.
        self._suspended = 0.0
        # Time of another submission before the end of the last job was recorded.
        self._asked: float | None = None

    def on(self, event: Event) -> None:
        when = self._time_of(event)
        if isinstance(event, Submitted):
            # A fast job may log its first event before its submitter does.
            if self._state in ("idle", "queue"):
                self._spend(when, self._state)
                self._state = "queue"
            else:
                self._asked = when
        elif isinstance(event, Opened):
            self._asked = None
            in_place = event.attempt is not None and event.attempt.in_place > 0
            waited = "start_up" if in_place and self._state == "requeue_wait" else self._state
            self._spend(when, self._lost if self._computes else waited)
            if not in_place:
                self._continue_from(None)
            self._state, self._attempt = "start_up", event.attempt
            self._script = bool(event.script)
        elif isinstance(event, CancelRequested) and self._state in ("queue", "requeue_wait"):
            # A cancelled job that was still waiting logs no end.
            self._spend(when, self._state)
            self._state = "idle"
        elif event.attempt != self._attempt:
            return
        elif isinstance(event, Started):
            self._spend(when, "start_up")
            if not self._script:
                self._lose_saves_after(event.step or 0)
            self._state = self._begin()
            self._continue_from(event.snapshot)
        elif isinstance(event, Stepped):
            # A script's own set-up is over after its first step.
            self._spend(when, "start_up")
            self._lose_saves_after(event.step or 0)
            self._state = "unsaved"
        elif isinstance(event, Saved):
            seconds = event.seconds or 0.0
            self._keep(when - seconds)
            self._spend(when, "checkpoint" if seconds else self._state)
            self._uncommitted = len(self._spans)
            self._saves.append((event.step or 0, self._uncommitted))
        elif isinstance(event, Suspended):
            # A later event shows which part the steps around the suspension belong to.
            self._suspended += event.seconds or 0.0
        elif isinstance(event, Stopped | Trained | Finished):
            if self._script and isinstance(event, Stopped) and event.committed:
                self._keep(when)
            elif self._script and self._computes:
                self._spend(when, self._lost)
            # After the last commit of an orderly end, nothing more is computed.
            self._spend(when, "start_up")
            self._state = "start_up"
        elif isinstance(event, Ended):
            self._end(event, when)

    def _end(self, event: Ended, when: float) -> None:
        seen = when - event.time + (event.last_seen or event.time)
        if event.cause == Cause.FINISHED.value:
            # The weights of a finished script have all of its steps.
            self._keep(seen)
        self._spend(seen, self._lost if self._computes else "start_up")
        self._state = "requeue_wait" if event.restart_allowed else "idle"
        if self._state == "idle":
            self._continue_from(None)
        if self._state == "idle" and self._asked is not None and self._asked > seen:
            self._spend(self._asked, "idle")
            self._state = "queue"

    def _time_of(self, event: Event) -> float:
        """Return the time of ``event`` in the clock of the first event, as far as the log shows it."""
        when = event.time + self._behind
        if self._at is None:
            self._at = when
        # A commit that is found later keeps its own time.
        if self._at - when > _CLOCKS_DIFFER and not (isinstance(event, Saved) and event.found):
            self._behind += self._at - when
            when = self._at
        return when

    def _begin(self) -> str:
        """Return the state after the start of the training, or of a script's program."""
        if not self._script:
            return "unsaved"
        if not self._reports:
            return "running"
        return "unsaved" if self._reports.get(self._attempt) is Saved else "start_up"

    @property
    def _computes(self) -> bool:
        return self._state in ("unsaved", "running")

    @property
    def _lost(self) -> str:
        """The part for the time since the last commit if the attempt died without a record."""
        return "running" if self._state == "running" else "recomputed"

    def _keep(self, until: float) -> None:
        """Count the computing since the last commit as kept."""
        if self._state == "unsaved":
            self._spend(until, "productive")
            self._uncommitted = len(self._spans)

    def _lose_saves_after(self, step: int) -> None:
        """Count the computing after the save of ``step`` as lost: a later attempt begins at ``step``."""
        if not self._saves or self._saves[-1][0] <= step:
            return
        while self._saves and self._saves[-1][0] > step:
            self._saves.pop()
        kept = self._saves[-1][1] if self._saves else 0
        self._spans[kept:] = [
            span._replace(part="recomputed") if span.part == "productive" else span
            for span in self._spans[kept:]
        ]

    def _continue_from(self, snapshot: float | None) -> None:
        """Divide the computing since the last commit into kept and lost.

        Args:
            snapshot: the time of the snapshot in memory that continues; None: memory keeps nothing.
        """
        kept = 0.0 if snapshot is None else snapshot + self._behind
        since = self._spans[self._uncommitted :]
        del self._spans[self._uncommitted :]
        # What an earlier start of the training has lost stays lost.
        open_ = self._begun - self._uncommitted
        for number, span in enumerate(since):
            if span.part == "productive" or (span.part == "recomputed" and number >= open_):
                cut = min(max(span.begin, kept), span.end)
                self._add("productive", span.begin, cut)
                self._add("recomputed", cut, span.end)
            else:
                self._spans.append(span)
        self._begun = len(self._spans)

    def closed(self, now: float, stepped: float | None, *, lost: bool) -> list[Span]:
        if self._at is None or self._state == "idle":
            return self._spans
        now += self._behind
        if self._computes and lost:
            self._spend(now, self._lost)
            self._continue_from(None)
        elif self._computes and stepped is not None:
            self._spend(stepped + self._behind, self._state)
            self._spend(now, "stalled")
        self._spend(now, self._state)
        return self._spans

    def _spend(self, until: float, part: str) -> None:
        assert self._at is not None
        if until > self._at:
            suspended = min(self._suspended, until - self._at)
            self._suspended -= suspended
            self._add(part, self._at, until - suspended)
            self._add("suspended", until - suspended, until)
            self._at = until

    def _add(self, part: str, begin: float, end: float) -> None:
        if end > begin:
            self._spans.append(Span(part, begin, end))
