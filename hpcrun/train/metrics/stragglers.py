"""Which rank the others wait for, by the time that each spends on its own part of a step."""

import statistics
import time
from collections.abc import Callable, Sequence

_FACTOR = 1.5
_LEAST = 0.01  # seconds; less is noise of the machine in tiny steps
_WEIGHT = 0.1
_QUIET = 600.0


def straggler(own: Sequence[float], step: float) -> int | None:
    """The rank that takes clearly longer than the others, or None.

    Args:
        own: seconds that each rank spends alone in a step.
        step: seconds of a whole step; what is small against it holds up nobody.
    """
    if len(own) < 2:
        return None
    rank = max(range(len(own)), key=own.__getitem__)
    usual = _others(own, rank)
    late = own[rank] - usual
    return rank if own[rank] > _FACTOR * usual and late > max(_WEIGHT * step, _LEAST) else None


class StragglerWatch:
    """Says once that a rank is slow, and again after ten minutes if it still is."""

    def __init__(self, hosts: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """``hosts``: of every rank."""
        self._hosts, self._clock = hosts, clock
        self._told: tuple[int, float] | None = None
        self._last: int | None = None

    def look(self, done: int, own: Sequence[float], step: float) -> str | None:
        """A line about a rank that was slow at this logged step and at the one before, if it is news."""
        rank, before = straggler(own, step), self._last
        self._last = rank
        if rank is None or rank != before:
            return None
        now = self._clock()
        if self._told is not None and self._told[0] == rank and now - self._told[1] < _QUIET:
            return None
        self._told = rank, now
        return (
            f"step {done}: the others wait for rank {rank} on {self._hosts[rank]}, which takes "
            f"{own[rank] * 1e3:.1f} ms for data and forward pass, and they {_others(own, rank) * 1e3:.1f} ms"
        )


def _others(own: Sequence[float], rank: int) -> float:
    return statistics.median([seconds for other, seconds in enumerate(own) if other != rank])
