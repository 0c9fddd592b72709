"""The decision between two settings from noisy trials: a rank test, its correction, a smallest effect.

A trial is one observation, independent of its number of calls: the calls of one process group are not
independent.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcrun.network.tune.cells import Cell, Trial

MIN_EFFECT = 0.05
ALPHA = 0.01
_MOST_REPEATS = 14


@dataclass(frozen=True)
class Comparison:
    """The trials of a setting against trials of the default in the same period.

    ``gain``: 0.1 if the setting takes 1 / 1.1 of the time; from the medians of the trials, over the cells.
    ``p``: the one-sided probability of such a difference if both settings were equal.
    """

    gain: float
    p: float
    trials: int
    problem: str | None = None

    def holds(self, level: float, effect: float) -> bool:
        """Return True if the gain is both significant and large enough."""
        return self.problem is None and self.p <= level and self.gain >= effect


def compare(setting: Sequence[Trial], default: Sequence[Trial]) -> Comparison:
    """Compare trials by the mean logarithm of the times of the cells that all trials have."""
    problem = next((trial.problem for trial in setting if trial.problem), None)
    if problem:
        return Comparison(-1.0, 1.0, len(setting), problem)
    working = [trial for trial in default if not trial.problem]
    if not working:
        # The default does not work at all, and the setting always did.
        return Comparison(
            math.inf, rank_test([0.0] * len(setting), [1.0] * len(default)), len(setting)
        )
    cells = _common([*setting, *working])
    if not cells:
        return Comparison(-1.0, 1.0, len(setting), "no cell was measured in all trials")
    ours = [_score(trial, cells) for trial in setting]
    # A failed trial of the default counts as slower than all others.
    theirs = [_score(trial, cells) for trial in working]
    failed = [math.inf] * (len(default) - len(working))
    gain = math.exp(statistics.median(theirs) - statistics.median(ours)) - 1
    return Comparison(gain, rank_test(ours, theirs + failed), len(setting))


def rank_test(low: Sequence[float], high: Sequence[float]) -> float:
    """Return the exact one-sided p of Mann and Whitney's test that ``low`` is lower.

    The distribution is that over all ways to divide the values in two, so that ties are exact as well.
    """
    ordered = sorted([*low, *high])
    # Twice the middle rank of equal values, a whole number.
    doubled = {value: 2 * ordered.index(value) + ordered.count(value) + 1 for value in set(ordered)}
    ranks = tuple(doubled[value] for value in ordered)
    observed = sum(doubled[value] for value in low)
    ways = _sums(ranks, len(low))
    total = sum(ways.values())
    return sum(count for value, count in ways.items() if value <= observed) / total


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p values corrected for their number, by Holm's method, in the given order."""
    order = sorted(range(len(ps)), key=lambda index: ps[index])
    corrected, floor = [0.0] * len(ps), 0.0
    for place, index in enumerate(order):
        floor = max(floor, min(1.0, ps[index] * (len(ps) - place)))
        corrected[index] = floor
    return corrected


def repeats_for(level: float) -> int:
    """Return the number of trials per side that suffices for ``level`` even with one outlier."""
    for count in range(4, _MOST_REPEATS):
        ordered = [float(value) for value in range(2 * count)]
        # The last of the lower values comes after all others.
        if rank_test([*ordered[: count - 1], 2.0 * count], ordered[count - 1 : -1]) <= level:
            return count
    return _MOST_REPEATS


def cell_gains(setting: Sequence[Trial], default: Sequence[Trial]) -> Mapping[Cell, float]:
    """Return the gain in each cell, between the medians of the trials."""
    working = [trial for trial in default if not trial.problem]
    cells = _common([*setting, *working]) if working else ()
    return {cell: median_time(working, cell) / median_time(setting, cell) - 1 for cell in cells}


def median_time(trials: Sequence[Trial], cell: Cell) -> float:
    """Return the median over the trials of the seconds of a cell."""
    return statistics.median(trial.timings[cell].seconds for trial in trials)


def _common(trials: Sequence[Trial]) -> list[Cell]:
    return sorted(set.intersection(*(set(trial.timings) for trial in trials)))


def _score(trial: Trial, cells: Sequence[Cell]) -> float:
    return statistics.fmean(math.log(trial.timings[cell].seconds) for cell in cells)


@functools.cache
def _sums(ranks: tuple[int, ...], count: int) -> Mapping[int, int]:
    """Return for each sum of ``count`` of the ranks the number of ways to reach it."""
    ways: list[dict[int, int]] = [{0: 1}] + [{} for _ in range(count)]
    for rank, chosen in itertools.product(ranks, range(count - 1, -1, -1)):
        for value, number in ways[chosen].items():
            ways[chosen + 1][value + rank] = ways[chosen + 1].get(value + rank, 0) + number
    return ways[count]
