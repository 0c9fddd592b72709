"""The attempts of a run, read from its event log for the restart policy and for `status`.

Every moment since the first submission belongs to exactly one part, so the parts add up to the wall time.
Clusters are compared by the share of productive time (ETTR, effective training time ratio: Kokolis et al.,
"Revisiting reliability in large-scale machine learning research clusters", 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from hpcrun.diagnose.causes import CERTAIN, is_cascade
from hpcrun.run.endings import Failure
from hpcrun.run.events import Attempt, Cause, Event

START_SECONDS = 60.0
"""An attempt that ended sooner counts as failed during its start."""

# Events that a person causes and that belong to no attempt.
_OF_PEOPLE = ("submitted", "cancelled", "cancel-failed", "preempted")


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt: its first step, its newest committed step, and its end (cause None: not known yet).

    ``crash_step`` is the step that was being computed at a crash. ``trained``: the attempt reached the
    end of the training; only the report was left. ``killed``: a script died of the
    stop signal, so it keeps only earlier saves, if any. ``unsaved``: a script ended well after a stop
    signal, and has reported steps but no save. ``failure``: the exception of a crash and its place, if only
    the program can be the cause.
    """

    attempt: Attempt
    started: float
    begun_at: int | None = None
    committed: int | None = None
    cause: Cause | None = None
    crash_step: int | None = None
    ended: float | None = None
    trained: bool = False
    killed: bool = False
    unsaved: bool = False
    failure: str | None = None

    @property
    def seconds(self) -> float | None:
        """Length of the attempt in seconds; None before its end."""
        return None if self.ended is None else self.ended - self.started

    @property
    def progressed(self) -> bool:
        """True if the attempt committed a step beyond its first step, or reached the end of the training."""
        return self.trained or (
            self.committed is not None and self.committed > (self.begun_at or 0)
        )


def histories(events: Sequence[Event]) -> list[AttemptRecord]:
    """Return the attempts since the last submission by a person, in order: older attempts use no budget."""
    job = None
    for event in events:
        # The new job may log its first event before its submitter does, and a job that was submitted
        # without hpcrun has no such event. A requeue keeps the job's id, so a new id is a new
        # submission.
        if event.what in ("submitted", "opened") and event.attempt is not None:
            job = event.attempt.job
    chain = jobs_of(events, job)
    return [
        record for record in all_histories(events) if job is None or record.attempt.job in chain
    ]


def jobs_of(events: Sequence[Event], job: str | None) -> set[str | None]:
    """Return ``job`` and the earlier jobs that it replaces because Slurm would not requeue them."""
    continues = {
        event.attempt.job: str(event.fields["continues"])
        for event in events
        if event.what == "submitted" and event.attempt and "continues" in event.fields
    }
    found: set[str | None] = {job}
    while job in continues and continues[job] not in found:
        job = continues[job]
        found.add(job)
    return found


def all_histories(events: Sequence[Event]) -> list[AttemptRecord]:
    """Return the attempts of all submissions, in order."""
    # A table of many runs has a hundred thousand events: one record for each attempt, not for each event.
    found: dict[Attempt, dict[str, Any]] = {}
    before: Attempt | None = None
    for event in events:
        if event.attempt is None or event.what in _OF_PEOPLE:
            continue
        record = found.get(event.attempt)
        if record is None:
            before = next(reversed(found), None)
            record = found[event.attempt] = {"started": event.time}
        if event.what == "started" and before not in (None, event.attempt):
            _note_start_of_next(found[before], on_disk(event) or 0)
        _note(record, event)
    return [AttemptRecord(attempt, **values) for attempt, values in found.items()]


def asked_to_end(events: Sequence[Event], attempt: Attempt) -> bool:
    """Return True if a person cancelled this attempt's job after the attempt had begun."""
    asked = False
    for event in events:
        if event.what == "opened" and event.attempt == attempt:
            asked = False
        elif event.attempt is None or event.attempt.job != attempt.job:
            continue
        elif event.what in ("cancelled", "cancel-failed"):
            asked = event.what == "cancelled"
    return asked


def asked_to_yield(events: Sequence[Event], attempt: Attempt) -> bool:
    """Return True if a person sent this attempt the signal of a preemption (``hpcrun preempt``)."""
    return any(event.what == "preempted" and event.attempt == attempt for event in events)


def asked_to_requeue(events: Sequence[Event], attempt: Attempt) -> bool:
    """Return True if `hpcrun preempt` came in the start of the job that ``attempt`` belongs to."""
    asked = (event.attempt for event in events if event.what == "preempted" and event.attempt)
    return any(one.is_of_start(attempt) for one in asked)


def _note(record: dict[str, Any], event: Event) -> None:
    if event.what == "started":
        record["begun_at"] = event.step
    elif event.what == "saved":
        record["committed"] = event.step
    elif event.what == "trained":
        record["trained"] = True
    elif event.what == "stopped":
        record["killed"] = bool(event.fields.get("killed"))
    elif event.what == "ended":
        record["cause"] = _cause(event.cause)
        record["crash_step"] = event.step if event.cause == Cause.CRASH.value else None
        record["ended"] = event.time
        record["unsaved"] = bool(event.fields.get("unsaved"))
        record["failure"] = event.fields.get("failure")


def _note_start_of_next(record: dict[str, Any], step: int) -> None:
    # A crash right after a commit loses the announcement, but the next attempt starts from that commit.
    if step > (record.get("committed") or record.get("begun_at") or 0):
        record["committed"] = step


def _cause(word: str | None) -> Cause | None:
    """Return the cause of that name; a word that no version of hpcrun writes counts as a crash."""
    if word is None:
        return None
    try:
        return Cause(word)
    except ValueError:
        return Cause.CRASH


def successor(events: Sequence[Event], attempt: Attempt) -> Attempt | None:
    """Return the newer attempt that owns the run after ``attempt``; None if ``attempt`` is the newest."""
    opened = [event.attempt for event in events if event.what == "opened" and event.attempt]
    if attempt in opened:
        opened = opened[len(opened) - opened[::-1].index(attempt) :]
        return opened[-1] if opened else None
    newer = [one for one in opened if attempt.is_before(one)]
    return newer[-1] if newer else None


def starts_before(events: Sequence[Event], attempt: Attempt) -> int:
    """Return the number of starts of the job's ranks before ``attempt``: requeues, and restarts in place."""
    opened = {event.attempt for event in events if event.what == "opened" and event.attempt}
    earlier = [one for one in opened if one.is_before(attempt) and not one.is_of_start(attempt)]
    return attempt.restart + attempt.in_place + sum(one.in_place > 0 for one in earlier)


def finished_before(events: Sequence[Event], attempt: Attempt) -> bool:
    """Return True if an earlier start of the same job has finished the run.

    Since 24.05, Slurm starts a job again that ends in the grace time of its preemption, even if the job
    ended well.
    """
    return any(
        event.what == "finished" or (event.what == "ended" and event.cause == Cause.FINISHED.value)
        for event in events
        if event.attempt is not None and event.attempt.is_before(attempt)
    )


def of_script(events: Sequence[Event]) -> bool:
    """Return True if the attempts ran a script; hpcrun does not know a script's files."""
    return any(event.what == "opened" and event.fields.get("script") for event in events)


def last_committed(events: Sequence[Event]) -> int | None:
    """Return the step at which a resume would begin, according to the log; None without a checkpoint.

    A start below the newest announced step shows that the checkpoints above it are damaged or gone.
    """
    newest: int | None = None
    for event in events:
        if event.step is None:
            continue
        if event.what == "started":
            newest = on_disk(event)
        elif event.what == "saved":
            newest = max(event.step, newest or 0)
    return newest


def on_disk(started: Event) -> int | None:
    """Return the newest step on disk at the event ``started``; None without a checkpoint.

    A restart in a job may begin at a later step, which only the memory of the nodes has.
    """
    step: int | None = started.fields.get("on_disk", started.step)
    return step or None


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run's wall time.

    queue: from a submission to the first start of its job. start_up: processes start, restore and end; also
    the whole time between two attempts in one allocation.
    productive: computing steps that a checkpoint kept. checkpoint: writing checkpoints.
    recomputed: computing steps that were lost and are computed again. requeue_wait: between
    two starts of a job. suspended: Slurm had stopped the processes to let another job run. idle: after an
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


class Span(NamedTuple):
    """A time from ``begin`` to ``end`` (Unix seconds) that belongs to one part of :class:`Goodput`."""

    part: str
    begin: float
    end: float


def goodput(events: Sequence[Event], now: float) -> Goodput:
    """Split the time from the first event to the end of the run, or to ``now`` (Unix seconds)."""
    parts = {field.name: 0.0 for field in fields(Goodput)}
    for span in spans(events, now):
        parts[span.part] += span.end - span.begin
    return Goodput(**parts)


def spans(events: Sequence[Event], now: float) -> list[Span]:
    """Return the time from the first event to the end of the run, or to ``now``, in order without gaps.

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
        self._spans: list[Span] = []
        # The first span after the last commit, and the first after the last start of the training.
        self._uncommitted, self._begun = 0, 0
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
            in_place = event.attempt is not None and event.attempt.in_place > 0
            waited = "start_up" if in_place and self._state == "requeue_wait" else self._state
            self._spend(event.time, self._lost if self._state == "running" else waited)
            if not in_place:
                self._continue_from(None)
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
            self._continue_from(event.fields.get("snapshot"))
        elif event.what == "saved":
            seconds = float(event.fields.get("seconds", 0.0))
            self._spend(event.time - seconds, "productive")
            self._spend(event.time, "checkpoint")
            self._uncommitted = len(self._spans)
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
            if self._state == "idle":
                self._continue_from(None)
            if self._state == "idle" and self._asked is not None and self._asked > seen:
                self._spend(self._asked, "idle")
                self._state = "queue"

    @property
    def _lost(self) -> str:
        """The part for the time since the last commit if the attempt died without a record."""
        return "productive" if self._script else "recomputed"

    def _continue_from(self, snapshot: float | None) -> None:
        """Divide the computing since the last commit into kept and lost.

        Args:
            snapshot: the time of the snapshot in memory that continues; None: memory keeps nothing.
        """
        if self._script:
            return
        since = self._spans[self._uncommitted :]
        del self._spans[self._uncommitted :]
        # What an earlier start of the training has lost stays lost.
        open_ = self._begun - self._uncommitted
        for number, span in enumerate(since):
            if span.part == "productive" or (span.part == "recomputed" and number >= open_):
                cut = min(max(span.begin, snapshot or 0.0), span.end)
                self._add("productive", span.begin, cut)
                self._add("recomputed", cut, span.end)
            else:
                self._spans.append(span)
        self._begun = len(self._spans)

    def closed(self, now: float) -> list[Span]:
        if self._at is not None and self._state != "idle":
            # Steps in progress count as kept until an event shows a loss.
            self._spend(now, "productive" if self._state == "running" else self._state)
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


def has_worked(events: Sequence[Event], attempt: Attempt) -> bool:
    """Return True if a start before ``attempt`` has trained, or has run a script for a minute."""
    chain = jobs_of(events, attempt.job)
    return any(
        record.begun_at is not None
        or record.progressed
        or _ran_long(events, record.attempt, record.ended)
        for record in all_histories(events)
        if record.attempt.job in chain and record.attempt != attempt
    )


def _ran_long(events: Sequence[Event], attempt: Attempt, end: float | None) -> bool:
    """Return True if the script of ``attempt`` had run for a minute at ``end``."""
    starts = [event.time for event in events if (event.what, event.attempt) == ("started", attempt)]
    if not starts or end is None or not of_script(events):
        return False
    return end - starts[-1] >= START_SECONDS


def concerns_a_node(events: Sequence[Event], attempt: Attempt, failures: Sequence[Failure]) -> bool:
    """Return True if other nodes may not have the error that ended ``attempt``, because the run has worked.

    All nodes of a run may lose the file server, and a single node may lose a mount.

    Args:
        failures: the records of its ranks, earliest first.
    """
    mine = [event for event in events if event.attempt == attempt and event.what == "bad-input"]
    refusal = mine[-1].fields if mine else {}
    own = [failure for failure in failures if not is_cascade(failure)]
    kind = refusal.get("kind") if mine else (own[0].kind if own else None)
    if refusal.get("certain") or kind in CERTAIN or (not mine and own and own[0].certain):
        return False
    if has_worked(events, attempt):
        return True
    if refusal or not own:
        return False
    saved = any(event.what == "saved" and event.attempt == attempt for event in events)
    # The last message of a script that has run for long may come from a program that the script called.
    return saved or _ran_long(events, attempt, own[0].time)
