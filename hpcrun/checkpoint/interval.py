"""Save intervals: by steps, by time, or from the failure rate.

All ranks must save at the same step, and their clocks differ. Rank 0 therefore converts the remaining time
into a number of steps and broadcasts it. Rank 0 repeats this when half of the remaining time has passed, or
as much time as had passed before. An interval needs only a few small collectives, however many steps it has.
"""

import math
import time
from collections.abc import Callable

from hpcrun.ranks.collective import Ranks

# Seconds that a save is assumed to cost before the first measurement.
_FIRST_GUESS = 5.0
_SHORTEST, _LONGEST = 30.0, 7200.0


class EverySteps:
    """Saves at the multiples of ``every`` steps, or at the first call after a multiple; 0: never."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._before: int | None = None

    def due(self, done: int) -> bool:
        """Return True if ``done`` is a multiple, or a multiple was passed since the previous call."""
        if not self._every:
            return False
        before, self._before = self._before, done
        passed = before is not None and done // self._every > before // self._every
        return passed or done % self._every == 0


class EverySeconds:
    """Saves once per ``seconds()``, which rank 0 evaluates during each interval."""

    def __init__(
        self,
        seconds: Callable[[], float],
        ranks: Ranks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self._ranks, self._clock = ranks, clock
        self._next: int | None = None
        self._since = (0, 0.0)

    def due(self, done: int) -> bool:
        """Return True if the time has passed. Collective at the steps where rank 0 checks its clock."""
        if self._next is None:
            self._since, self._next = (done, self._clock()), done + 1
            return False
        if done < self._next:
            return False
        answer, self._next = self._ranks.from_rank_0(lambda: self._check_clock(done))
        if answer:
            self._since = (done, self._clock())
        return answer

    def _check_clock(self, done: int) -> tuple[bool, int]:
        step, began = self._since
        elapsed = self._clock() - began
        pace = elapsed / (done - step)
        left = self.seconds() - elapsed
        if left <= pace / 2:
            return True, done + 1
        # Look ahead no further than the elapsed part of the interval. Its first steps may be quick (a GPU
        # only queues the work at first), and a guess from them could put the next check off for hours.
        ahead = done - step
        if pace > 0:
            ahead = min(ahead, int(left / pace / 2))
        return False, done + max(1, ahead)


SaveInterval = EverySteps | EverySeconds
"""A rule for when to save. Every rank calls it after every step, because it may be collective."""


def young(cost: tuple[float, float] | None, failure_seconds: float) -> float:
    """Return the seconds between saves, from 30 seconds to two hours: the square root of 2 · T_fail · T_save.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.

    Args:
        cost: seconds that training waited for the last save, and seconds until its commit; None before the
            first save. The interval is at least twice the time until the commit.
        failure_seconds: mean time between failures.
    """
    stalled, written = (_FIRST_GUESS, 0.0) if cost is None else cost
    best = math.sqrt(2 * max(stalled, 0.01) * failure_seconds)
    return min(_LONGEST, max(_SHORTEST, 2 * written, best))
