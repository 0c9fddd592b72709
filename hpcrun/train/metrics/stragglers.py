"""Find a rank that slows down the other ranks, by the time of each rank's own part of a step."""

import statistics
import time
from collections.abc import Callable, Sequence

_FACTOR = 1.5
_LEAST = 0.01  # Seconds; in tiny steps smaller differences are noise.
_WEIGHT = 0.1
_QUIET = 600.0


def straggler(own: Sequence[float], step: float) -> int | None:
    """Return the rank that takes clearly longer than the others, or None.

    Args:
        own: seconds of each rank's own part of a step (data and forward pass).
        step: seconds of a whole step; a delay must be a noticeable part of it.
    """
    if len(own) < 2:
        return None
    rank = max(range(len(own)), key=own.__getitem__)
    usual = _others(own, rank)
    late = own[rank] - usual
    return rank if own[rank] > _FACTOR * usual and late > max(_WEIGHT * step, _LEAST) else None


class StragglerWatch:
    """Reports a slow rank once, and again after ten minutes if it is still slow."""

    def __init__(self, hosts: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """``hosts``: the host of every rank."""
        self._hosts, self._clock = hosts, clock
        self._reported: tuple[int, float] | None = None
        self._last: int | None = None

    def check(self, done: int, own: Sequence[float], step: float) -> str | None:
        """Return a line about a rank that was slow in this logged step and the previous one, if it is new."""
        rank, before = straggler(own, step), self._last
        self._last = rank
        if rank is None or rank != before:
            return None
        now = self._clock()
        if (
            self._reported is not None
            and self._reported[0] == rank
            and now - self._reported[1] < _QUIET
        ):
            return None
        self._reported = rank, now
        return (
            f"step {done}: the other ranks wait for rank {rank} on {self._hosts[rank]}: it takes "
            f"{own[rank] * 1e3:.1f} ms for data and forward pass, they take {_others(own, rank) * 1e3:.1f} ms"
        )


def _others(own: Sequence[float], rank: int) -> float:
    return statistics.median([seconds for other, seconds in enumerate(own) if other != rank])
