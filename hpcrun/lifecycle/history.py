"""The lives of a run, read from its event log: what the restart policy and `status` look at."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from hpcrun.run.events import Attempt, Event


class Cause(str, Enum):
    """Why an attempt ended."""

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


# Events about a job that a person writes, and no attempt.
_OF_PEOPLE = ("submitted", "cancelled", "preempted")


@dataclass(frozen=True)
class Life:
    """One attempt: where it began, how far it got on disk, and how it ended (cause None: unknown yet).

    ``crash_step`` is the step that was being computed when it crashed, if it did. ``trained``: it came to the
    end of the training, after which only the report was left to do. ``killed``: a script that died of the
    signal to stop, so that it has what it had saved before, if anything. ``failure``: the words of a
    crash, without rank and node.
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
    failure: str | None = None

    @property
    def seconds(self) -> float | None:
        """The length of the attempt, once it has ended."""
        return None if self.ended is None else self.ended - self.started

    @property
    def progressed(self) -> bool:
        """Whether it committed a step beyond the one it began at, or there were none left to take."""
        return self.trained or (
            self.committed is not None and self.committed > (self.begun_at or 0)
        )


def lives(events: Sequence[Event]) -> list[Life]:
    """The attempts since the last submission by a person, in order: older ones eat no budget."""
    job = None
    for event in events:
        # The new job may have logged its first words before its submitter did, and one that was
        # submitted without us has no submitter: a requeue keeps the job's id, so another id is
        # another submission.
        if event.what in ("submitted", "opened") and event.attempt is not None:
            job = event.attempt.job
    chain = jobs_of(events, job)
    return [life for life in all_lives(events) if job is None or life.attempt.job in chain]


def jobs_of(events: Sequence[Event], job: str | None) -> set[str | None]:
    """``job`` and the jobs before it that it goes on for, because Slurm would not requeue them."""
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


def all_lives(events: Sequence[Event]) -> list[Life]:
    """The attempts of all submissions, in order."""
    found: dict[Attempt, Life] = {}
    before: Attempt | None = None
    for event in events:
        if event.attempt is None or event.what in _OF_PEOPLE:
            continue
        life = found.get(event.attempt)
        if life is None:
            life, before = Life(event.attempt, event.time), next(reversed(found), None)
        if event.what == "started" and before is not None:
            found[before] = _with_start_of_next(found[before], event.step or 0)
        found[event.attempt] = _with_event(life, event)
    return list(found.values())


def asked_to_end(events: Sequence[Event], attempt: Attempt) -> bool:
    """Whether a person told this attempt's job to end, after it had begun."""
    asked = False
    for event in events:
        if event.what == "opened" and event.attempt == attempt:
            asked = False
        elif event.what == "cancelled" and event.attempt is not None:
            asked = asked or event.attempt.job == attempt.job
    return asked


def asked_to_yield(events: Sequence[Event], attempt: Attempt) -> bool:
    """Whether a person sent this attempt the signal of a preemption (``hpcrun preempt``)."""
    return any(event.what == "preempted" and event.attempt == attempt for event in events)


def _with_event(life: Life, event: Event) -> Life:
    if event.what == "started":
        return replace(life, begun_at=event.step)
    if event.what == "saved":
        return replace(life, committed=event.step)
    if event.what == "trained":
        return replace(life, trained=True)
    if event.what == "stopped":
        return replace(life, killed=bool(event.fields.get("killed")))
    if event.what == "ended":
        return replace(
            life,
            cause=_cause(event.cause),
            crash_step=event.step if event.cause == Cause.CRASH.value else None,
            ended=event.time,
            failure=event.fields.get("failure"),
        )
    return life


def _with_start_of_next(life: Life, step: int) -> Life:
    # A crash right after a commit loses the announcement, but not what the next one starts from.
    return replace(life, committed=step) if step > (life.committed or life.begun_at or 0) else life


def _cause(word: str | None) -> Cause | None:
    """The cause of that name; a word that no version of ours writes counts as a crash."""
    if word is None:
        return None
    try:
        return Cause(word)
    except ValueError:
        return Cause.CRASH


def successor(events: Sequence[Event], attempt: Attempt) -> Attempt | None:
    """The attempt that has taken the run over from ``attempt``, or None while it is the newest."""
    opened = [event.attempt for event in events if event.what == "opened" and event.attempt]
    if attempt in opened:
        opened = opened[len(opened) - opened[::-1].index(attempt) :]
        return opened[-1] if opened else None
    newer = [one for one in opened if one.job == attempt.job and one.restart > attempt.restart]
    return newer[-1] if newer else None


def finished_before(events: Sequence[Event], attempt: Attempt) -> bool:
    """Whether an earlier start of the same job has finished the run.

    Since 24.05 Slurm itself starts a job again that ends in the grace time of its preemption, also one
    that ended well.
    """
    return any(
        event.what == "finished" or (event.what == "ended" and event.cause == Cause.FINISHED.value)
        for event in events
        if event.attempt is not None
        and event.attempt.job == attempt.job
        and event.attempt.restart < attempt.restart
    )


def of_script(events: Sequence[Event]) -> bool:
    """Return whether the starts ran a script, whose files hpcrun does not know."""
    return any(event.what == "opened" and event.fields.get("script") for event in events)


def last_committed(events: Sequence[Event]) -> int | None:
    """The step that a resume would begin at, as far as the log knows; None without a checkpoint.

    A start below the newest announced step shows that the checkpoints above it are damaged or gone.
    """
    newest: int | None = None
    for event in events:
        if event.step is None:
            continue
        if event.what == "started":
            newest = event.step or None
        elif event.what == "saved":
            newest = max(event.step, newest or 0)
    return newest
