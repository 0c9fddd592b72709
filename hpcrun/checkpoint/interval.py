"""When the next save is due: after so many steps, so much time, or as often as failures make it pay.

All ranks must save at the same step, and their clocks differ: time is turned into a number of steps by
rank 0 and told to the others, anew when half of what is left has passed, or as much as has passed already.
That takes a handful of small collectives an interval, however many steps it has.
"""

import math
import time
from collections.abc import Callable
from typing import Protocol

from hpcrun.checkpoint.sharded.collective import Together

FIRST_GUESS = 5.0
"""Seconds that a save is taken to cost before one was measured."""

_SHORTEST, _LONGEST = 30.0, 7200.0


class Interval(Protocol):
    """Says after each step whether to save. May be collective: every rank asks after every step."""

    def due(self, done: int) -> bool:
        """Whether to save after ``done`` steps; the same on all ranks."""
        ...


class EverySteps:
    """At the multiples of ``every`` steps, or at the first step asked for after one; 0: never."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._before: int | None = None

    def due(self, done: int) -> bool:
        """Whether ``done`` is one, or none was asked for since the last one passed."""
        if not self._every:
            return False
        before, self._before = self._before, done
        passed = before is not None and done // self._every > before // self._every
        return passed or done % self._every == 0


class EverySeconds:
    """Once in the time that ``seconds`` gives, asked on rank 0 when an interval begins."""

    def __init__(
        self,
        seconds: Callable[[], float],
        together: Together,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._together, self._clock = seconds, together, clock
        self._next: int | None = None
        self._since = (0, 0.0)

    def due(self, done: int) -> bool:
        """Whether the time has come. Collective at the steps where the ranks look at rank 0's clock."""
        if self._next is None:
            self._since, self._next = (done, self._clock()), done + 1
            return False
        if done < self._next:
            return False
        answer, self._next = self._together.from_rank_0(lambda: self._look(done))
        if answer:
            self._since = (done, self._clock())
        return answer

    def _look(self, done: int) -> tuple[bool, int]:
        step, began = self._since
        elapsed = self._clock() - began
        pace = elapsed / (done - step)
        left = self._seconds() - elapsed
        if left <= pace / 2:
            return True, done + 1
        # No further ahead than the interval is long already: its first steps may be quick, as those
        # are that a device has only been told to make, and would put the next look off for hours.
        ahead = done - step
        if pace > 0:
            ahead = min(ahead, int(left / pace / 2))
        return False, done + max(1, ahead)


def young(save_seconds: float, failure_seconds: float) -> float:
    """The time between saves that loses least: the square root of 2 · T_fail · T_save.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * save_seconds * failure_seconds)


def pays(stalled: float | None, written: float | None, failure_seconds: float) -> float:
    """Seconds between saves by Young's formula, within half a minute and two hours.

    Args:
        stalled: seconds that the last save took from training; None before the first.
        written: seconds until it was committed; saves do not follow faster than twice that.
        failure_seconds: mean time between failures.
    """
    best = young(max(stalled or 0.0, 0.01) if stalled is not None else FIRST_GUESS, failure_seconds)
    return min(_LONGEST, max(_SHORTEST, 2 * (written or 0.0), best))
