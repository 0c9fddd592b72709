"""Save intervals: by steps, by time, or from the failure rate.

All ranks must save at the same step, and their clocks differ. Rank 0 therefore converts the remaining time
into a number of steps and broadcasts it. Rank 0 repeats this when half of the remaining time has passed, or
as much time as had passed before. An interval needs only a few small collectives, however many steps it has.
"""

import math
import time
from collections.abc import Callable
from typing import Protocol

from hpcrun.ranks.collective import Ranks

FIRST_GUESS = 5.0
"""Seconds that a save is assumed to cost before the first measurement."""

_SHORTEST, _LONGEST = 30.0, 7200.0


class SaveInterval(Protocol):
    """A rule for when to save. Every rank calls it after every step, because it may be collective."""

    def due(self, done: int) -> bool:
        """Return True if a save is due after ``done`` steps; the same on all ranks."""
        ...


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


def choose_interval(
    *,
    every: int,
    minutes: float | None,
    failure_seconds: float | None,
    costs: Callable[[], tuple[float, float] | None],
    ranks: Ranks,
    clock: Callable[[], float] = time.monotonic,
) -> SaveInterval:
    """Make an interval: by Young's formula, in minutes, or in steps; the first that is not None.

    Args:
        every: steps.
        minutes: minutes.
        failure_seconds: mean time between failures, for Young's formula.
        costs: returns (seconds that training waits, seconds until the commit) of the last save; None before
            the first.
    """
    if failure_seconds is not None:
        failure = failure_seconds

        def best() -> float:
            stalled, written = costs() or (None, None)
            return pays(stalled, written, failure)

        return EverySeconds(best, ranks, clock)
    if minutes is not None:
        seconds = 60.0 * minutes
        return EverySeconds(lambda: seconds, ranks, clock)
    return EverySteps(every)


def young(save_seconds: float, failure_seconds: float) -> float:
    """Return the optimal time between saves in seconds: the square root of 2 · T_fail · T_save.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * save_seconds * failure_seconds)


def pays(stalled: float | None, written: float | None, failure_seconds: float) -> float:
    """Return the seconds between saves by Young's formula, from 30 seconds to two hours.

    Args:
        stalled: seconds that training waited for the last save; None before the first save.
        written: seconds until the last save was committed; the interval is at least twice as long.
        failure_seconds: mean time between failures.
    """
    best = young(max(stalled or 0.0, 0.01) if stalled is not None else FIRST_GUESS, failure_seconds)
    return min(_LONGEST, max(_SHORTEST, 2 * (written or 0.0), best))
