"""Curves of one run, and bands over the seeds of one config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hpcrun.results.groups import RunGroup
from hpcrun.results.report.runs import ReportedRun
from hpcrun.results.statistics import CONFIDENCE, t_quantile

Item = TypeVar("Item")
Line = NDArray[np.float64]
# A figure is some 400 pixels wide.
_MOST_POINTS = 400


@dataclass(frozen=True)
class Band:
    """The mean over ``n`` runs and its t-interval; ``low`` and ``high`` are None for n = 1."""

    x: Line
    mean: Line
    low: Line | None
    high: Line | None
    n: int


def band(series: Sequence[tuple[Line, Line]]) -> Band | None:
    """Return the band of curves over the range that all curves share; None without a curve.

    A curve has a value between two of its points by linear interpolation. Outside the shared range
    the mean would be of other runs than inside.
    """
    curves = [_unique(x, y) for x, y in series if len(x)]
    if not curves:
        return None
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    grid = _sampled(grid[(grid >= first) & (grid <= last)])
    if not len(grid):
        return None
    rows = np.array([np.interp(grid, x, y) for x, y in curves])
    mean, n = rows.mean(axis=0), len(rows)
    if n < 2:
        return Band(grid, mean, None, None, n)
    half = t_quantile(0.5 + CONFIDENCE / 2, n - 1) * rows.std(axis=0, ddof=1) / np.sqrt(n)
    return Band(grid, mean, mean - half, mean + half, n)


def sampled(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most ``most`` of ``items``, evenly over their order."""
    if len(items) <= most:
        return list(items)
    return [items[at * len(items) // most] for at in range(most)]


def thinned(x: Line, y: Line) -> tuple[Line, Line]:
    """Return a curve with few points: the lowest and the highest value of each part stay."""
    if len(x) <= _MOST_POINTS:
        return x, y
    parts = np.array_split(np.arange(len(x)), _MOST_POINTS // 2)
    kept = {0, len(x) - 1}
    for part in parts:
        kept |= {int(part[y[part].argmin()]), int(part[y[part].argmax()])}
    index = np.array(sorted(kept))
    return x[index], y[index]


def wants_log(values: Sequence[Line]) -> bool:
    """Return True if all values are positive and span more than a factor of 30."""
    whole = np.concatenate([one for one in values if len(one)] or [np.empty(0)])
    # A quotient of floats may overflow; a product of Python's floats becomes infinite without a warning.
    return bool(len(whole) and whole.min() > 0 and float(whole.max()) > 30 * float(whole.min()))


def members(
    group: RunGroup, runs: Sequence[ReportedRun]
) -> tuple[list[ReportedRun], list[ReportedRun]]:
    """Return the runs of ``group`` that count, and those that do not."""
    counting = {value.run for value in group.values}
    others = {key for key, _, _ in group.left_out}
    return [run for run in runs if run.key in counting], [run for run in runs if run.key in others]


def _unique(x: Line, y: Line) -> tuple[Line, Line]:
    """Return the last value of each x."""
    last = np.append(np.diff(x) > 0, True)
    return x[last], y[last]


def _sampled(grid: Line) -> Line:
    if len(grid) <= _MOST_POINTS:
        return grid
    sampled: Line = grid[np.unique(np.linspace(0, len(grid) - 1, _MOST_POINTS).astype(int))]
    return sampled
