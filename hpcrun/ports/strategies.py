"""Strategies: they choose how a run starts again after an end, if the policy allows another start.

A strategy chooses among starts; it neither allows one nor makes one. The batch step keeps both: it looks for
a cancellation after each answer, and a start that is impossible becomes a requeue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcrun.errors import UserError
from hpcrun.ports.entry_points import STRATEGIES

if TYPE_CHECKING:
    from hpcrun.config import Config
    from hpcrun.run.attempt import Attempt
    from hpcrun.run.journal.events import Cause
    from hpcrun.run.journal.state import State

# Seconds. The nodes of the job wait for the answer.
_PATIENCE = 30.0


@dataclass(frozen=True)
class AttemptEnd:
    """The end of an attempt that the policy allows to start again.

    Attributes:
        run: the run directory.
        state: what follows from the journal, with this end: ``state.attempts`` has a record of each attempt.
        attempt: the attempt that has ended.
        cause: the cause of its end.
        line: the cause in the words of the log.
        config: the resolved config.
        watched: True if the job knows which of its nodes are lost, so that a step on the others may follow.
    """

    run: Path
    state: State
    attempt: Attempt
    cause: Cause
    line: str
    config: Config
    watched: bool = False


@dataclass(frozen=True)
class Start:
    """The next start of a run.

    Attributes:
        how: ``step``: a new step in the same job, without a queue; ``requeue``: Slurm starts the job again;
            ``job``: a new job follows this one. On this machine, a new job is a requeue.
        reason: for the log, in a few words.
    """

    how: Literal["step", "requeue", "job"]
    reason: str


Strategy = Callable[[AttemptEnd], "Start | None"]
"""Returns the next start; None leaves the choice to the next strategy."""


def next_start(
    end: AttemptEnd, say: Callable[[str], None], cancelled: Callable[[], bool]
) -> Start | None:
    """Return the start that ``restarts.strategies``, and then hpcrun, choose; None if the run is cancelled.

    Args:
        end: the end of the attempt.
        say: prints a line.
        cancelled: returns True if a person has cancelled the run; called after each strategy of a package.
    """
    names = end.config.restarts.strategies
    start = choose(names, end, say, cancelled) if names else None
    if start is None and not (names and cancelled()):
        own: Strategy = STRATEGIES.load("in-place")
        return own(end)
    return start


def choose(
    names: Sequence[str],
    end: AttemptEnd,
    say: Callable[[str], None],
    cancelled: Callable[[], bool],
    *,
    seconds: float = _PATIENCE,
) -> Start | None:
    """Return the first answer of the strategies ``names``; None without one, or if the run is cancelled.

    A strategy that fails, is missing, or does not answer in time costs a line, and the next one is asked.

    Args:
        names: the strategies, in the order in which they are asked.
        end: the end of the attempt.
        say: prints a line.
        cancelled: returns True if a person has cancelled the run; called after each strategy.
        seconds: the time for an answer.
    """
    for name in names:
        try:
            answer = _answer(name, end, seconds)
        except UserError as error:
            say(f"restarts.strategies: {error}; it is passed over")
            answer = None
        # The strategy may have taken its time.
        if cancelled():
            return None
        if answer is not None:
            say(f"the strategy {name} chooses {answer.how}: {answer.reason}")
            return answer
    return None


def _answer(name: str, end: AttemptEnd, seconds: float) -> Start | None:
    """Return the answer of the strategy ``name``; raises UserError for any failure of it."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(STRATEGIES.load(name)(end))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise UserError(f"{name}: no answer within {seconds:g} s")
    answer = found[0]
    if isinstance(answer, UserError):
        raise answer
    if isinstance(answer, BaseException):
        raise UserError(f"{name}: {type(answer).__name__}: {(str(answer).splitlines() or [''])[0]}")
    if answer is not None and getattr(answer, "how", None) not in ("step", "requeue", "job"):
        raise UserError(f"{name}: its answer is no Start: {str(answer)[:100]!r}")
    return answer  # type: ignore[no-any-return]
