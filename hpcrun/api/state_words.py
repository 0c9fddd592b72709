"""The state of a run in plain words, for readers who do not know Slurm's states."""

import re
import time
from collections.abc import Mapping

from hpcrun.run.journal.events import Ended, Opened, Started, Submitted, Trained
from hpcrun.run.journal.state import State
from hpcrun.slurm.launch.jobs import RunState

_CAUSES = {
    "preemption": ("preemption", "preemptions"),
    "time-limit": ("time limit", "time limits"),
    "node-failure": ("node failure", "node failures"),
    "crash": ("crash", "crashes"),
    "hang": ("hang", "hangs"),
    "continued": ("request to be continued", "requests to be continued"),
}
_DAY = 86_400


def state_in_words(state: RunState, journal: State, now: float, overdue: str = "") -> str:
    """Return ``state`` as one clause, such as ``requeued after preemption, starts 14:02``.

    Args:
        journal: the state by the journal of the run.
        now: the present time in Unix seconds, to print an expected start.
        overdue: what a running run has not done for long, such as ``no step for 2 min``.
    """
    if state.word == "pending":
        return _waiting(state, journal, now)
    if state.word == "running":
        return _running(state, journal, overdue)
    if state.word == "new":
        return "not submitted yet"
    return _with_detail(state.word, own_message_first(state.detail))


# The command of a script may have semicolons too.
_OF_RANK = re.compile(
    r"(?P<rank>rank \d+ on [^\s:]+): "
    r"(?P<message>ScriptFailed: .+? (?:ended|was killed) [^;]*|[^;]+)(?P<rest>.*)",
    re.DOTALL,
)


def own_message_first(detail: str) -> str:
    """Return ``detail`` with the message of a failed rank before its rank and node: a table cuts the end."""
    found = _OF_RANK.fullmatch(detail)
    if not found:
        return detail
    message = found["message"].removeprefix("ScriptFailed: ")
    return f"{message} ({found['rank']}){found['rest']}"


def restarts_in_words(restarts: Mapping[str, int], in_place: int = 0) -> str:
    """Return ``2 preemptions, 1 crash (1 in place)``; a dash without any restart."""
    reported = [
        f"{count} {_CAUSES.get(cause, (cause, cause))[count != 1]}"
        for cause, count in restarts.items()
    ]
    note = f" ({in_place} in place)" if in_place else ""
    return ", ".join(reported) + note or "-"


def _clock(when: float, now: float) -> str:
    """Return a time as ``14:02``, or ``Mon 14:02`` on another day within a week, or with its date."""
    then = time.localtime(when)
    if abs(when - now) < _DAY and then.tm_yday == time.localtime(now).tm_yday:
        form = "%H:%M"
    else:
        form = "%a %H:%M" if abs(when - now) < 6 * _DAY else "%d %b %H:%M"
    return time.strftime(form, then)


def _waiting(state: RunState, journal: State, now: float) -> str:
    reason = state.detail or "waiting"
    if not state.asked:
        reason = f"waiting; {state.detail}"
    elif not reason.startswith(("waiting", "stuck")):
        reason = f"waiting: {reason}"
    cause = _requeued_after(journal)
    later = state.starts is not None and state.starts > now
    starts = f", starts {_clock(state.starts or now, now)}" if later else ""
    if cause is None:
        return reason + starts
    requeued = f"requeued after {_CAUSES.get(cause, (cause,))[0]}"
    return requeued + starts if starts else f"{requeued}; {reason}"


def _requeued_after(journal: State) -> str | None:
    """Return the cause after which the waiting job starts again; None if a person submitted it."""
    for event in reversed(journal.events):
        if isinstance(event, Ended):
            return event.cause if event.restart_allowed else None
        # A follow-up job, which replaces a job that Slurm does not requeue, is not submitted by a person.
        if isinstance(event, Submitted) and event.continues is None:
            return None
    return None


def in_minutes(seconds: float) -> str:
    """Return seconds as ``2 min``, or ``5 h`` from two hours on."""
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _running(state: RunState, journal: State, overdue: str) -> str:
    # The table has a column for restarts.
    detail = "" if state.detail.startswith("restart ") else state.detail
    if not state.asked:
        return f"running; {detail}"
    newest = [*journal.of_kind(Opened, Started, Trained)][-1:]
    starts = bool(newest) and isinstance(newest[0], Opened)
    if not detail and starts and not journal.of_script:
        return "running: its ranks start"
    # A stall is more urgent than its place.
    return _with_detail("running", overdue or detail)


def _with_detail(word: str, detail: str) -> str:
    if not detail:
        return word
    return detail if detail.startswith(word) else f"{word}: {detail}"
