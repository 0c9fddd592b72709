"""The strategy ``in-place``: a new step of the same job after an end that needs no requeue."""

from hpcrun.ports.strategies import AttemptEnd, Start
from hpcrun.run.attempt import Attempt
from hpcrun.run.journal.events import Cause
from hpcrun.run.journal.state import START_SECONDS, State

# The job itself has to end after these causes, or its time is over.
_POSSIBLE = frozenset({Cause.CRASH, Cause.HANG})


def attempt_obstacle(
    state: State, attempt: Attempt, cause: Cause, *, wanted: bool, watched: bool = False
) -> str | None:
    """Return why the end of ``attempt`` needs a requeue; None if a new step may follow.

    The delay of a requeue helps if a file server is out of service. So a requeue follows an attempt that
    failed within a minute and without progress, unless it was the first of its job and had begun to train.

    Args:
        state: the state of the run, with the end of the attempt.
        wanted: ``restarts.in_place``.
        watched: lost nodes are known, so a step on the other nodes may follow.
    """
    if not wanted:
        return "restarts.in_place is false"
    if watched and cause is Cause.NODE_FAILURE:
        return None
    if cause not in _POSSIBLE:
        return f"the cause was {cause.value}"
    record = next((one for one in state.attempts if one.attempt == attempt), None)
    if record is None:
        return "the attempt has no record"
    hasty = record.seconds is not None and record.seconds < START_SECONDS
    if hasty and not record.progressed and (attempt.in_place or record.begun_at is None):
        return "it failed within a minute of its start"
    return None


def start_in_place(end: AttemptEnd) -> Start:
    """Choose a new step of the same job, unless the end needs a requeue: the strategy ``in-place``."""
    obstacle = attempt_obstacle(
        end.state,
        end.attempt,
        end.cause,
        wanted=end.config.restarts.in_place,
        watched=end.watched,
    )
    return Start("step", "its nodes live") if obstacle is None else Start("requeue", obstacle)
