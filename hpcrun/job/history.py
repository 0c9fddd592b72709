"""The attempts of a run, read from its event log for the restart policy and for `status`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcrun.diagnose.causes import CERTAIN, is_cascade
from hpcrun.diagnose.of_nodes import is_there
from hpcrun.run.endings import Failure, node_name
from hpcrun.run.events import Attempt, Cause, Event

START_SECONDS = 60.0
"""An attempt that ended sooner counts as failed during its start."""

# Errors of a node without a file that the other nodes have.
_OF_FILES = frozenset(
    {
        *("FileNotFoundError", "ImportError", "ModuleNotFoundError", "NotADirectoryError"),
        "PermissionError",
    }
)
# Events that a person causes and that belong to no attempt.
_OF_PEOPLE = ("submitted", "cancelled", "cancel-failed", "preempted")


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
        record["crash"] = str(event.fields.get("crash") or "")
        record["passing"] = bool(event.fields.get("passing"))


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


def _on_one_of_several(
    events: Sequence[Event], attempt: Attempt, failures: Sequence[Failure]
) -> bool:
    """Return True if ``attempt`` had several nodes, and only one of them has failures."""
    opened = [one for one in events if (one.what, one.attempt) == ("opened", attempt)]
    nodes = opened[-1].fields.get("nodes") if opened else 1
    return isinstance(nodes, int) and nodes > 1 and len({one.host for one in failures}) == 1


def _only_there(events: Sequence[Event], attempt: Attempt, own: Sequence[Failure]) -> bool:
    """Return True if one other node of several lacks a file that this node has."""
    first = own[0]
    if first.host == node_name() or not _on_one_of_several(events, attempt, own):
        return False
    return first.bad_input and is_there(first.message)


def concerns_a_node(events: Sequence[Event], attempt: Attempt, failures: Sequence[Failure]) -> bool:
    """Return True if other nodes may not have the error that ended ``attempt``.

    All nodes of a run that has worked may lose the file server. A single node may lack a mount or a package.

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
    works = ("saved",) if own or mine else ("saved", "stepped")
    saved = any(event.what in works and event.attempt == attempt for event in events)
    if refusal:
        return False
    if not own:
        return saved or _ran_long(events, attempt, time.time())
    if _only_there(events, attempt, own):
        return True
    if own[0].kind in _OF_FILES and of_script(events) and _on_one_of_several(events, attempt, own):
        return True
    # The last message of a script that has run for long may come from a program that the script called.
    return saved or _ran_long(events, attempt, own[0].time)
