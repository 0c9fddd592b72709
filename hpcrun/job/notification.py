"""The notifications of a run: the name for each end of an attempt, and the notifications that are due.

The event of an end names its notification. A later event ``notified`` or ``notify-failed`` records its
delivery. So a process can find in the event log what a killed process has not sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hpcrun.run.events import Attempt, Cause, Event

KEY = "notification"
"""The field of an event that names the notification."""

_FAILED = (Cause.BAD_INPUT, Cause.SAVE_FAILED)


@dataclass(frozen=True)
class Due:
    """A notification to send: its name (such as ``failed``), the attempt, and the event that asks for it."""

    name: str
    attempt: Attempt
    event: Event


def notification_of(cause: Cause, *, restart: bool, attempts: int) -> str:
    """Return the name of the notification for the end of an attempt.

    Args:
        cause: the cause of the end.
        restart: another attempt follows.
        attempts: attempts since the last submission by a person, this one included.
    """
    if restart:
        return "requeued"
    if cause is Cause.FINISHED:
        return "finished"
    if cause is Cause.CANCELLED:
        return "cancelled"
    if cause in _FAILED or (attempts < 2 and cause is not Cause.EXHAUSTED):
        return "failed"
    return "budget-used-up"


def due(events: Sequence[Event]) -> list[Due]:
    """Return the notifications in the event log without a recorded delivery, in order."""
    asked: dict[tuple[str, Attempt], Due] = {}
    for event in events:
        name = event.fields.get(KEY)
        if not isinstance(name, str) or event.attempt is None:
            continue
        if event.what in ("notified", "notify-failed"):
            asked.pop((name, event.attempt), None)
        else:
            asked[name, event.attempt] = Due(name, event.attempt, event)
    return list(asked.values())
