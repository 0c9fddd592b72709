"""Limits of the watchdog: how long a rank may make no progress, and the times of an alarm."""

from collections.abc import Callable
from dataclasses import dataclass

from hpcrun.train.phase import PREPARING, TRAINING, VALIDATING, Position

_PREPARES = 48
"""Multiple of ``hang_start`` for ``Task.prepare``, which may download for hours; a day by default."""

_TOGETHER = frozenset({TRAINING, VALIDATING})
"""Work in which a rank does nothing without the other ranks."""


@dataclass(frozen=True)
class StallLimits:
    """Maximum seconds without progress: in a step, in work outside steps, and in ``Task.prepare``."""

    step: float
    other: float
    prepare: float

    @classmethod
    def of(cls, hang_after: float, hang_start: float, timeout: float) -> "StallLimits":
        """Make the limits; a step gets at most half of the collectives' ``timeout``."""
        step = min(hang_after, timeout / 2)
        other = max(step, hang_start)
        return cls(step, other, max(other, _PREPARES * hang_start))

    def allowed(self, position: Position) -> float:
        """Return the limit at ``position``; the first step may compile, so it has the limit of other work."""
        moving = position.step is not None and position.step > position.start
        return self.step if moving and position.doing == TRAINING else self.around(position.doing)

    def exceeded(self, idle: float, position: Position, awaited: Callable[[], bool]) -> bool:
        """Return True if a rank at ``position`` has made no progress for too long: ``idle`` seconds.

        A step also waits for a rank in work outside steps. ``awaited`` returns True during such work; it is
        asked beyond the limit only, because it asks the other ranks.
        """
        if idle < self.allowed(position):
            return False
        waits = awaited()
        return idle >= self.other or not waits

    def around(self, work: str) -> float:
        """Return the limit for ``work`` outside steps."""
        return self.prepare if work == PREPARING else self.other

    @property
    def tick(self) -> float:
        """Seconds between two checks."""
        return min(5.0, self.step / 10)

    @property
    def answer(self) -> float:
        """Seconds that the ranks have to answer an alarm."""
        return min(10.0, max(0.2, self.step / 4))

    def survive(self, work: str) -> float:
        """Return the seconds that a rank in ``work`` may outlive a rank that has failed.

        In other work than steps, a rank may still commit a save that the failed rank has written.
        """
        return self.answer if work in _TOGETHER else 6 * self.answer

    def end(self, work: str) -> float:
        """Return the seconds after which a process without progress in ``work`` has ended in any case."""
        return self.around(work) + self.unheard + self.alarm

    @property
    def unheard(self) -> float:
        """Seconds beyond the limit after which the watchdog process considers the thread blocked."""
        return self.answer + 3 * self.tick

    @property
    def alarm(self) -> float:
        """Maximum seconds from an alarm to the end of the process."""
        return 4 * self.answer + 12 * self.tick
