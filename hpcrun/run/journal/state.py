"""The state of a run: the facts that follow from its events. Every decision is a function of it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, overload

from hpcrun.run.attempt import Attempt
from hpcrun.run.journal.events import (
    CancelRequested,
    Cause,
    Ended,
    Event,
    Finished,
    Opened,
    Preempted,
    Prepared,
    Pruned,
    Saved,
    Started,
    Stopped,
    Submitted,
    Trained,
    Unknown,
)

START_SECONDS = 60.0
"""An attempt that ended sooner counts as failed during its start."""

PRUNED = "a search ended it early; `hpcrun resume` continues it"

NO_SIGN = (Submitted, Prepared, CancelRequested, Preempted, Unknown)
"""Events that come without ranks, of the supervisor, a person or a newer version: no sign of an attempt."""

E = TypeVar("E", bound=Event)
F = TypeVar("F", bound=Event)


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt: its first step, its newest committed step, and its end (cause None: not known yet).

    ``crash_step`` is the step that was being computed at a crash. ``trained``: the attempt reached the
    end of the training; only the report was left. ``killed``: a script died of the
    stop signal, so it keeps only earlier saves, if any. ``unsaved``: a script ended well after a stop
    signal, and has reported steps but no save. ``crash``: the exception of a crash and its place, or its
    signal; empty if unknown. ``failure``: the same, if only the program can be the cause. ``passing``: a file
    system, a network or a node may be the cause, so that an equal crash may have another cause.
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
    crash: str = ""
    passing: bool = False

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


class State:
    """The facts that follow from the events of a run, oldest first."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events

    def after(self, event: Event) -> "State":
        """Return the state after a further ``event``."""
        return State([*self.events, event])

    @overload
    def of_kind(self, kind: type[E], /) -> Iterator[E]: ...
    @overload
    def of_kind(self, kind: type[E], other: type[F], /) -> Iterator[E | F]: ...
    @overload
    def of_kind(self, *kinds: type[Event]) -> Iterator[Event]: ...
    def of_kind(self, *kinds: type[Event]) -> Iterator[Event]:
        """Yield the events of these ``kinds``, oldest first."""
        return (event for event in self.events if isinstance(event, kinds))

    def of(self, attempt: Attempt) -> "State":
        """Return the state by the events of ``attempt`` only."""
        return State([event for event in self.events if event.attempt == attempt])

    def without_opening(self, attempt: Attempt) -> "State":
        """Return the state as if ``attempt`` had not opened the run."""
        opened = (Opened, attempt)
        return State([event for event in self.events if (type(event), event.attempt) != opened])

    def newest(self, kind: type[E], attempt: Attempt | None = None) -> E | None:
        """Return the newest event of ``kind``, of any attempt if ``attempt`` is None."""
        for event in reversed(self.events):
            if isinstance(event, kind) and attempt in (None, event.attempt):
                return event
        return None

    # Attempts.

    @cached_property
    def attempts(self) -> list[AttemptRecord]:
        """The attempts of all submissions, in order."""
        # A table of many runs has a hundred thousand events: a record for each attempt, not for each event.
        found: dict[Attempt, dict[str, Any]] = {}
        before: Attempt | None = None
        for event in self.events:
            if event.attempt is None or isinstance(event, NO_SIGN):
                continue
            record = found.get(event.attempt)
            if record is None:
                before = next(reversed(found), None)
                record = found[event.attempt] = {"started": event.time}
            if isinstance(event, Started) and before is not None and before != event.attempt:
                _note_start_of_next(found[before], event.committed or 0)
            _note(record, event)
        return [AttemptRecord(attempt, **values) for attempt, values in found.items()]

    @property
    def attempts_of_newest_job(self) -> list[AttemptRecord]:
        """The attempts since the last submission by a person, in order: older attempts use no budget."""
        job = None
        for event in self.of_kind(Submitted, Opened):
            # The new job may log its first event before its submitter does, and a job that was submitted
            # without hpcrun has no such event. A requeue keeps the job's id, so a new id is a new submission.
            if event.attempt is not None:
                job = event.attempt.job
        return self.attempts if job is None else self.attempts_of(job)

    def attempts_of(self, job: str) -> list[AttemptRecord]:
        """Return the attempts of ``job`` and of the jobs that it continues, in order."""
        chain = self.chain(job)
        return [record for record in self.attempts if record.attempt.job in chain]

    def chain(self, job: str) -> set[str]:
        """Return ``job`` and the earlier jobs that it replaces because Slurm would not requeue them."""
        continues = {
            event.attempt.job: event.continues
            for event in self.of_kind(Submitted)
            if event.attempt and event.continues is not None
        }
        found = {job}
        while job in continues and continues[job] not in found:
            job = continues[job]
            found.add(job)
        return found

    @cached_property
    def openings(self) -> list[Opened]:
        """The events with which attempts became the owner of the run, oldest first."""
        return list(self.of_kind(Opened))

    @property
    def owner(self) -> Attempt | None:
        """The attempt that opened the run last."""
        return self.openings[-1].attempt if self.openings else None

    def opening(self, attempt: Attempt) -> Opened | None:
        """Return the newest opening of ``attempt``."""
        return next((one for one in reversed(self.openings) if one.attempt == attempt), None)

    def has_opened(self, attempt: Attempt) -> bool:
        """Return True if ``attempt`` became the owner of the run."""
        return self.opening(attempt) is not None

    def is_prepared(self, attempt: Attempt) -> bool:
        """Return True if the supervisor lets ``attempt`` begin."""
        return self.newest(Prepared, attempt) is not None

    def successor(self, attempt: Attempt) -> Attempt | None:
        """Return the newer attempt that owns the run after ``attempt``; None: ``attempt`` is the newest."""
        opened = [one.attempt for one in self.openings if one.attempt]
        if attempt in opened:
            opened = opened[len(opened) - opened[::-1].index(attempt) :]
            return opened[-1] if opened else None
        newer = [one for one in opened if attempt.is_before(one)]
        return newer[-1] if newer else None

    def starts_before(self, attempt: Attempt) -> int:
        """Return the starts of the job's ranks before ``attempt``: requeues, and restarts in place."""
        opened = {one.attempt for one in self.openings if one.attempt}
        earlier = [one for one in opened if one.is_before(attempt) and not one.is_of_start(attempt)]
        return attempt.restart + attempt.in_place + sum(one.in_place > 0 for one in earlier)

    def finished_before(self, attempt: Attempt) -> bool:
        """Return True if an earlier start of the same job has finished the run.

        Since 24.05, Slurm starts a job again that ends in the grace time of its preemption, even if the job
        ended well.
        """
        return any(
            isinstance(event, Finished) or event.cause == Cause.FINISHED.value
            for event in self.of_kind(Finished, Ended)
            if event.attempt is not None and event.attempt.is_before(attempt)
        )

    @property
    def of_script(self) -> bool:
        """True if the attempts ran a script; hpcrun does not know a script's files."""
        return any(one.script for one in self.openings)

    def nodes_of(self, attempt: Attempt) -> int:
        """Return the number of nodes of ``attempt``; 0 if the journal does not have it."""
        opened = self.opening(attempt)
        return (opened.nodes if opened else 0) or 0

    # Requests of people.

    def asked_to_end(self, attempt: Attempt) -> bool:
        """Return True if a person cancelled this attempt's job after the attempt had begun."""
        asked = False
        for event in self.of_kind(Opened, CancelRequested):
            if isinstance(event, Opened):
                asked = asked and event.attempt != attempt
            elif event.attempt is not None and event.attempt.job == attempt.job:
                asked = True
        return asked

    def asked_to_yield(self, attempt: Attempt) -> bool:
        """Return True if a person sent this attempt the signal of a preemption (``hpcrun preempt``)."""
        return self.newest(Preempted, attempt) is not None

    def asked_to_requeue(self, attempt: Attempt) -> bool:
        """Return True if `hpcrun preempt` came in the start of the job that ``attempt`` belongs to."""
        asked = (event.attempt for event in self.of_kind(Preempted) if event.attempt)
        return any(one.is_of_start(attempt) for one in asked)

    def was_cancelled(self, job: str) -> bool:
        """Return True if the job was cancelled since it was submitted and last opened the run."""
        mine = [
            event
            for event in self.of_kind(Submitted, Opened, CancelRequested)
            if event.attempt is not None and event.attempt.job == job
        ]
        return bool(mine) and isinstance(mine[-1], CancelRequested)

    @property
    def was_pruned(self) -> bool:
        """True if a search pruned the run since its newest submission."""
        found = [*self.of_kind(Submitted, Pruned)]
        return bool(found) and isinstance(found[-1], Pruned)

    # Jobs.

    @property
    def job(self) -> tuple[str, str] | None:
        """The (executor, job id) to which the run was last submitted, or None.

        A job that a person submitted without hpcrun is known only after it has opened the run.
        """
        executors: dict[str, str] = {}
        for event in self.of_kind(Submitted, Opened):
            if event.attempt is None or event.executor is None:
                continue
            job = event.attempt.job
            if isinstance(event, Submitted):
                executors.pop(job, None)
                executors[job] = event.executor
            else:
                executors.setdefault(job, event.executor)
        return next(((executor, job) for job, executor in reversed(executors.items())), None)

    def newest_of_job(self, job: str) -> Attempt:
        """Return the newest attempt of ``job``; the first one if no event names any."""
        mine = (event.attempt for event in self.events if event.attempt)
        return max(
            (attempt for attempt in mine if attempt.job == job),
            key=lambda attempt: (attempt.restart, attempt.in_place),
            default=Attempt(job, 0),
        )

    def cluster_of(self, job: str) -> str | None:
        """Return the cluster to which ``job`` was submitted, if known."""
        found = [
            event.cluster
            for event in self.of_kind(Submitted, Opened)
            if event.attempt and event.attempt.job == job and event.cluster is not None
        ]
        return found[-1] if found else None

    # Checkpoints and work.

    @property
    def committed(self) -> int | None:
        """The step at which a resume would begin, according to the log; None without a checkpoint.

        A start below the newest announced step shows that the checkpoints above it are damaged or gone.
        """
        newest: int | None = None
        for event in self.of_kind(Started, Saved):
            if event.step is None:
                continue
            newest = event.committed if isinstance(event, Started) else max(event.step, newest or 0)
        return newest

    def has_worked(self, attempt: Attempt) -> bool:
        """Return True if a start before ``attempt`` has trained, or has run a script for a minute."""
        return any(
            record.begun_at is not None
            or record.progressed
            or self.ran_long(record.attempt, record.ended)
            for record in self.attempts_of(attempt.job)
            if record.attempt != attempt
        )

    def ran_long(self, attempt: Attempt, end: float | None) -> bool:
        """Return True if the script of ``attempt`` had run for a minute at ``end`` (Unix seconds)."""
        started = self.newest(Started, attempt)
        if started is None or end is None or not self.of_script:
            return False
        return end - started.time >= START_SECONDS

    @property
    def restarts(self) -> Mapping[str, int]:
        """The number of restarts that followed each cause, the most frequent first."""
        counts = Counter(
            end.cause for end in self.of_kind(Ended) if end.cause and end.restart_allowed
        )
        return dict(counts.most_common())

    @property
    def restarts_in_place(self) -> int:
        """The number of attempts that began as a new step of the same allocation."""
        return sum(one.attempt is not None and one.attempt.in_place > 0 for one in self.openings)


def _note(record: dict[str, Any], event: Event) -> None:
    if isinstance(event, Started):
        record["begun_at"] = event.step
    elif isinstance(event, Saved):
        record["committed"] = event.step
    elif isinstance(event, Trained):
        record["trained"] = True
    elif isinstance(event, Stopped):
        record["killed"] = bool(event.killed)
    elif isinstance(event, Ended):
        record["cause"] = _cause(event.cause)
        record["crash_step"] = event.step if event.cause == Cause.CRASH.value else None
        record["ended"] = event.time
        record["unsaved"] = bool(event.unsaved)
        record["failure"] = event.failure
        record["crash"] = event.crash or ""
        record["passing"] = bool(event.passing)


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
