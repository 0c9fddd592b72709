"""Statistics over seeds: intervals, t-tests of differences, and the correction for many tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special, stats

_LEVEL = 0.975
"""The upper end of a two-sided interval with a confidence of 95 %."""


@dataclass(frozen=True)
class ConfidenceInterval:
    """An estimate with the ends of its confidence interval; both are None for too few values."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Spread:
    """The values of one config over its seeds. ``std`` has n - 1 in its denominator."""

    n: int
    mean: ConfidenceInterval
    std: float | None
    median: float


@dataclass(frozen=True)
class ConfigDifference:
    """The difference of two configs: the mean of the second minus the mean of the first.

    Args:
        sizes: the runs of the first and of the second in the test.
        wins: the pairs in which the second is better; None for Welch's t-test, which has no pairs.
        effect: Cohen's d: the difference over the standard deviation of the paired differences, or over the
            root mean square of both standard deviations.
        p: two-sided; None, as ``effect``, for too few values and for equal differences.
        corrected: ``p`` after Holm's correction for all tests.
    """

    sizes: tuple[int, int]
    wins: int | None
    difference: ConfidenceInterval
    effect: float | None = None
    p: float | None = None
    corrected: float | None = None


def describe(values: Sequence[float]) -> Spread:
    """Return the statistics of ``values``, which must be finite and at least one, with the t-interval."""
    found, low, high, std = np.asarray(values, np.float64), None, None, None
    mean = float(found.mean())
    if len(found) > 1:
        half = float(stats.t.ppf(_LEVEL, len(found) - 1) * stats.sem(found))
        std = float(found.std(ddof=1))
        low, high = mean - half, mean + half
    interval = ConfidenceInterval(mean, low, high)
    return Spread(len(found), interval, std, float(np.median(found)))


def compare(
    first: Mapping[str, float],
    second: Mapping[str, float],
    *,
    lower: bool = True,
) -> ConfigDifference:
    """Return how ``second`` differs from ``first``. Equal keys, such as the seed, make a pair.

    With at least two pairs, and pairs for half of the smaller side, the test is the paired t-test, else the
    t-test of Welch (1947) of all values. ``lower``: lower values are better.
    """
    shared = sorted(first.keys() & second.keys())
    paired = len(shared) >= 2 and 2 * len(shared) >= min(len(first), len(second))
    a, b = (
        np.array([side[key] for key in (shared if paired else side)], np.float64)
        for side in (first, second)
    )
    sizes, changes = (len(a), len(b)), b - a if paired else np.empty(0)
    if min(sizes) < 2:
        return ConfigDifference(
            sizes, None, ConfidenceInterval(float(b.mean() - a.mean()), None, None)
        )
    if paired:
        wins = int(((changes < 0) if lower else (changes > 0)).sum())
        change, std, freedom = float(changes.mean()), float(changes.std(ddof=1)), len(shared) - 1.0
        error = std / math.sqrt(len(shared))
    else:
        wins, change = None, float(b.mean() - a.mean())
        parts = np.array([side.var(ddof=1) / len(side) for side in (a, b)])
        error, std = math.sqrt(parts.sum()), math.sqrt((parts * sizes).mean())
        shares = parts / (parts.sum() or 1.0)
        freedom = 1 / float((shares**2 / (np.array(sizes) - 1)).sum() or 1.0)
    half = float(special.stdtrit(freedom, _LEVEL)) * error
    difference = ConfidenceInterval(change, change - half, change + half)
    # Equal values leave the rounding of their mean as a standard deviation.
    if not 1e-12 * max(np.abs(a).max(), np.abs(b).max()) < std < math.inf:
        return ConfigDifference(sizes, wins, difference)
    p = 2 * float(special.stdtr(freedom, -abs(change) / error))
    return ConfigDifference(sizes, wins, difference, change / std, p)


def compare_all(
    groups: Sequence[Mapping[str, float]],
    against: int | None = None,
    *,
    lower: bool = True,
) -> tuple[list[ConfigDifference | None], int]:
    """Return how each config differs from a base, and the number of tests in Holm's correction.

    The base itself and a config without values have None.

    Args:
        groups: the values of each config by seed.
        against: the base, which has values. None: the first config that has values, chosen by them; the
            correction is then for the tests of all pairs, as in ``pairwise.t.test`` of R.
    """
    full = [at for at, group in enumerate(groups) if group]
    base = next(iter(full), 0) if against is None else against
    others = [(base, at) for at in full if at != base]
    found = {
        (a, b): compare(groups[a], groups[b], lower=lower)
        for a, b in (itertools.combinations(full, 2) if against is None else others)
    }
    tested = [pair for pair, one in found.items() if one.p is not None]
    corrected = dict(zip(tested, holm([found[pair].p for pair in tested]), strict=True))
    rows = {b: replace(found[a, b], corrected=corrected.get((a, b))) for a, b in others}
    return [rows.get(at) for at in range(len(groups))], len(tested)


def holm(values: Sequence[float | None]) -> list[float]:
    """Return p-values corrected for the number of all (Holm 1979, Scandinavian Journal of Statistics 6)."""
    p = np.array(values, np.float64)
    order = np.argsort(p)
    p[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1.0)
    return list(p.tolist())
