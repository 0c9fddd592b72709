"""Statistics over seeds: intervals and paired comparisons, computed by scipy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95


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
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """The differences b - a over shared seeds.

    ``effect`` is Cohen's d of the differences (their mean over their standard deviation), ``p`` the
    two-sided p-value of the paired t-test. Both are None for n = 1 and for equal differences.
    """

    n: int
    difference: ConfidenceInterval
    effect: float | None
    p: float | None
    wins: int
    ties: int


def describe(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Spread:
    """Return the statistics of ``values``, which must be finite and at least one."""
    found = np.asarray(values, np.float64)
    return Spread(
        n=len(found),
        mean=mean_interval(found, confidence),
        std=float(found.std(ddof=1)) if len(found) > 1 else None,
        median=float(np.median(found)),
        low=float(found.min()),
        high=float(found.max()),
    )


def mean_interval(
    values: NDArray[np.float64], confidence: float = CONFIDENCE
) -> ConfidenceInterval:
    """Return the mean and its t-interval."""
    mean = float(values.mean())
    if len(values) < 2:
        return ConfidenceInterval(mean, None, None)
    half = float(half_width(values, confidence))
    return ConfidenceInterval(mean, mean - half, mean + half)


def half_width(values: NDArray[np.float64], confidence: float = CONFIDENCE) -> Any:
    """Return half of the t-interval of the mean over the first axis, which has at least two values."""
    return stats.t.ppf(0.5 + confidence / 2, len(values) - 1) * stats.sem(values)


def compare_paired(
    first: Sequence[float],
    second: Sequence[float],
    *,
    lower_is_better: bool = True,
    confidence: float = CONFIDENCE,
) -> Paired:
    """Return how ``second`` differs from ``first``, seed by seed; both are in the order of the seeds."""
    change = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    n = len(change)
    wins = int(((change < 0) if lower_is_better else (change > 0)).sum())
    std = float(change.std(ddof=1)) if n > 1 else 0.0
    effect = p = None
    # Equal differences leave the rounding of their mean as a standard deviation.
    if std > 1e-12 * float(np.abs(change).max()):
        effect = float(change.mean()) / std
        p = float(stats.ttest_1samp(change, 0.0).pvalue)
    return Paired(n, mean_interval(change, confidence), effect, p, wins, int((change == 0).sum()))
