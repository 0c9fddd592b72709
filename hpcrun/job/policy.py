"""Decision about a restart of a run: a pure function of its history and its budgets.

Slurm's restart count mixes all causes, so preemptions would use the budget for crashes;
here every cause is counted separately (invariant 8).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hpcrun.config import Config
from hpcrun.run.journal.events import Cause
from hpcrun.run.journal.state import START_SECONDS, AttemptRecord


@dataclass(frozen=True)
class Budgets:
    """Number of restarts that each cause allows since the last submission by a person; None: unlimited.

    A ``script`` need not report its progress (``hpcrun.report``). Without a report, ``no_progress`` counts
    only ends after which the script may begin from the start: ends by the warning before the time limit,
    and requests to be continued within a minute.
    """

    crash: int | None = 3
    node_failure: int | None = 10
    preemption: int | None = None
    time_limit: int | None = None
    hang: int | None = 3
    no_progress: int | None = 3
    same_step: int | None = 2
    script: bool = False

    @classmethod
    def of(cls, config: Config) -> "Budgets":
        """Return the budgets of the run with this ``config``."""
        return cls(**config.restarts.budgets, script=bool(config.command))


@dataclass(frozen=True)
class Decision:
    """The decision about a restart, with the reason for the log and the screen."""

    restart: bool
    reason: str


_FINAL = {
    Cause.FINISHED: "the training is done",
    Cause.CANCELLED: "`hpcrun resume` continues it",
    Cause.BAD_INPUT: "fix the input and start it again",
    Cause.SAVE_FAILED: "its checkpoint could not be written when it had to stop",
    Cause.EXHAUSTED: "its restart budget was used up",
}

# The cluster causes the other ends: they may happen during a long start, any number of times.
OWN_DOING = frozenset({Cause.CRASH, Cause.HANG, Cause.TIME_LIMIT, Cause.CONTINUED})

# Two ends at the same place of a program: the ratio of their times, and the seconds of a slow start.
_SAME_TIME, _SLOW_START = 1.5, 2 * START_SECONDS

_WORDS = {
    Cause.CRASH: ("crash", "crashes"),
    Cause.HANG: ("hang", "hangs"),
    Cause.NODE_FAILURE: ("node failure", "node failures"),
    Cause.PREEMPTION: ("preemption", "preemptions"),
    Cause.TIME_LIMIT: ("time limit", "time limits"),
    Cause.CONTINUED: ("request to be continued", "requests to be continued"),
}


def decide(history: Sequence[AttemptRecord], budgets: Budgets) -> Decision:
    """Decide about the last attempt of ``history``; its cause must be known.

    Raises:
        ValueError: there is no attempt, or the cause of the last attempt is not known.
    """
    if not history or history[-1].cause is None:
        raise ValueError("the policy needs a history with an ended last attempt")
    last = history[-1]
    cause = last.cause
    assert cause is not None
    if cause in _FINAL:
        return Decision(False, _FINAL[cause])
    if last.unsaved:
        return Decision(
            False,
            "it has reported steps and no save, so a restart would begin at step 0: report its saves, or its "
            "end with hpcrun.report(done=True); `hpcrun resume` starts it again",
        )
    reported = not budgets.script or any(record.committed is not None for record in history)
    idle, most = _idle_restarts(history), budgets.no_progress
    if reported and most is not None and cause in OWN_DOING and idle >= most:
        return Decision(
            False,
            f"{idle} attempts ended by themselves and committed no new step (restarts.no_progress)",
        )
    unsaved = 0 if reported else _unsaved_limits(history)
    if most is not None and not reported:
        hopeless = _unseen_idling(history, unsaved, most)
        if hopeless is not None:
            return Decision(False, hopeless)
    if cause is Cause.CRASH:
        repeated = _crashes_at_step(history)
        if budgets.same_step is not None and repeated >= budgets.same_step:
            return Decision(
                False,
                f"it crashed {repeated} times at step {last.crash_step} (restarts.same_step)",
            )
        if budgets.same_step is not None and _same_failures(history) >= budgets.same_step:
            return Decision(
                False,
                f"it failed {budgets.same_step} times in the same way at the same place, so another start "
                f"would fail too (restarts.same_step): {last.failure}",
            )
    limit = {
        Cause.CRASH: budgets.crash,
        Cause.HANG: budgets.hang,
        Cause.NODE_FAILURE: budgets.node_failure,
        Cause.PREEMPTION: budgets.preemption,
        Cause.TIME_LIMIT: budgets.time_limit,
        Cause.CONTINUED: None,
    }[cause]
    count = sum(record.cause is cause for record in history)
    word = _WORDS[cause][count != 1]
    if limit is not None and count > limit:
        key = cause.value.replace("-", "_")
        return Decision(False, f"{count} {word}, {limit} allowed (restarts.{key})")
    allowed, tail = "any number" if limit is None else str(limit), ""
    if unsaved and most is not None and cause is Cause.TIME_LIMIT:
        tail = f"; {most} consecutive if the script dies of it: restarts.no_progress"
    return Decision(True, f"restart {count} after {_WORDS[cause][1]} ({allowed} allowed{tail})")


def _unseen_idling(history: Sequence[AttemptRecord], unsaved: int, most: int) -> str | None:
    """Return the reason not to restart a script that reports no progress; None if it may restart.

    Args:
        unsaved: consecutive time limits at which the warning signal killed the script.
        most: ``restarts.no_progress``.
    """
    if unsaved >= most:
        return (
            f"{unsaved} consecutive times the script died of the warning before its time limit and saved "
            "nothing (restarts.no_progress): have it save on that signal (job.warn_signal), then "
            "`hpcrun resume`; if it saves regularly anyway, set restarts.no_progress=null"
        )
    hasty = _early_continuations(history)
    if hasty >= most:
        return (
            f"{hasty} consecutive times the script asked to be continued within a minute of its start "
            "(restarts.no_progress): it makes no progress; `hpcrun.report` reports progress"
        )
    return None


def _early_continuations(history: Sequence[AttemptRecord]) -> int:
    count = 0
    for record in reversed(history):
        if record.cause is not Cause.CONTINUED or not _within_start(record):
            break
        count += 1
    return count


def _within_start(record: AttemptRecord) -> bool:
    return record.seconds is not None and record.seconds < START_SECONDS


def _idle_restarts(history: Sequence[AttemptRecord]) -> int:
    """Count the ends that the run itself caused since the last progress.

    A time limit counts too: the job had all the time that it asked for.
    """
    count = 0
    for record in reversed(history):
        if record.progressed:
            break
        count += record.cause in OWN_DOING
    return count


def _unsaved_limits(history: Sequence[AttemptRecord]) -> int:
    """Count the newest time limits, ignoring preemptions: a script may finish between two of these."""
    count = 0
    for record in reversed(history):
        if not record.killed:
            break
        count += record.cause is Cause.TIME_LIMIT
    return count


def _crashes_at_step(history: Sequence[AttemptRecord]) -> int:
    """Count the crashes of the last kind at the last step.

    A crash that a file system, a network or a node may cause has no equal: at the first step of a restart,
    two different causes have the same step.
    """
    last = history[-1]
    if last.crash_step is None or last.passing:
        return 0
    return sum(
        record.cause is Cause.CRASH
        and (record.crash_step, record.crash, record.passing)
        == (last.crash_step, last.crash, False)
        for record in history
    )


def _same_failures(history: Sequence[AttemptRecord]) -> int:
    """Count the newest crashes with the last exception, at its place, after about the same time.

    A crash that a node or a server may cause has no equal. None counts once an attempt has made progress, or
    has run longer and ended in another way: an unavailable file server gives equal messages too. Ends that
    the cluster caused in between neither count nor interrupt the series.
    """
    last = history[-1]
    if not last.failure:
        return 0
    duration = last.seconds or 0.0
    count = 0
    for record in reversed(history):
        seconds = record.seconds or 0.0
        equal = record.failure == last.failure and record.crash_step == last.crash_step
        if record.progressed or (not equal and seconds > max(_SLOW_START, _SAME_TIME * duration)):
            return 0
        if record.cause not in OWN_DOING:
            continue
        if not equal or duration > max(_SLOW_START, _SAME_TIME * seconds):
            break
        count += 1
    return count
