"""The parameters in which runs differ, and how a metric depends on each."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrun.results.config_text import SAME_TRAINING
from hpcrun.results.groups import seed_keys
from hpcrun.results.report.runs import ReportedRun
from hpcrun.results.statistics import ConfidenceInterval, mean_interval

_NOT_SWEPT = ("name", "command")
# A mean at each value needs runs that share the value.
_MOST_MEANS = 12


@dataclass(frozen=True)
class Sensitivity:
    """A metric against one swept parameter.

    Args:
        numbers: the parameter is a number in each run; else ``x`` counts its ``labels``.
        rho: Spearman's rank correlation, of numbers only; None if it is undefined.
        eta: share of the metric's variance between the values of the parameter (eta squared, 0 to 1);
            None if each run has another value.
        means: x and the mean over the runs with this value, with its t-interval.
    """

    key: str
    numbers: bool
    labels: Sequence[str]
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    rho: float | None
    eta: float | None
    means: Sequence[tuple[float, ConfidenceInterval]]

    @property
    def strength(self) -> float:
        """The larger of eta squared and the squared rank correlation, to sort by."""
        return max(self.eta or 0.0, (self.rho or 0.0) ** 2)


def swept_keys(runs: Sequence[ReportedRun], seed_key: str = "seed") -> list[str]:
    """Return the keys of the config in which runs with a config differ, without the seed."""
    known = [run for run in runs if run.config]
    found = dict.fromkeys(key for run in known for key in run.config)
    left_out = {*_NOT_SWEPT, seed_key, f"--{seed_key.rpartition('.')[2]}"}
    left_out.update(*(seed_keys(run.config, seed_key) for run in known))
    return [
        key
        for key in found
        if key not in left_out
        and not key.startswith(SAME_TRAINING)
        and len({shown(run.config.get(key)) for run in known}) > 1
    ]


def shown(value: Any) -> str:
    """Return a value of the config in a few words."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, default=str)


def several(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def number(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def sensitivities(
    runs: Sequence[ReportedRun], values: Mapping[str, float], keys: Sequence[str]
) -> list[Sensitivity]:
    """Return the sensitivity to each of ``keys``, the strongest first.

    Args:
        values: the metric of each run that counts, by the key of the run.
    """
    counting = [run for run in runs if run.key in values]
    found = [_sensitivity(key, counting, values) for key in keys]
    return sorted((one for one in found if one is not None), key=lambda one: -one.strength)


def _sensitivity(
    key: str, runs: Sequence[ReportedRun], values: Mapping[str, float]
) -> Sensitivity | None:
    y = np.array([values[run.key] for run in runs])
    numbers = [number(run.config.get(key)) for run in runs]
    texts = [shown(run.config.get(key)) for run in runs]
    if len(set(texts)) < 2:
        return None
    if all(one is not None for one in numbers):
        x, labels = np.array(numbers, np.float64), []
    else:
        labels = sorted(set(texts))
        x = np.array([labels.index(text) for text in texts], np.float64)
    is_number = not labels
    return Sensitivity(
        key,
        is_number,
        labels,
        x,
        y,
        rank_correlation(x, y) if is_number else None,
        _eta(x, y),
        _means(x, y),
    )


def rank_correlation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    """Return Spearman's rank correlation; None for fewer than three pairs or a constant."""
    if len(x) < 3:
        return None
    first, second = _ranks(x), _ranks(y)
    if not first.std() or not second.std():
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks; equal values have the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return ranks


def _eta(x: NDArray[np.float64], y: NDArray[np.float64]) -> float | None:
    total = float(((y - y.mean()) ** 2).sum())
    groups = _by_value(x, y)
    if not total or len(groups) == len(y):
        return None
    between = sum(len(one) * (one.mean() - y.mean()) ** 2 for one in groups.values())
    return float(between / total)


def _means(
    x: NDArray[np.float64], y: NDArray[np.float64]
) -> list[tuple[float, ConfidenceInterval]]:
    groups = _by_value(x, y)
    if len(groups) > _MOST_MEANS or len(groups) == len(y):
        return []
    return [(at, mean_interval(one)) for at, one in sorted(groups.items())]


def _by_value(x: NDArray[np.float64], y: NDArray[np.float64]) -> dict[float, NDArray[np.float64]]:
    found: dict[float, list[float]] = defaultdict(list)
    for at, value in zip(x.tolist(), y.tolist(), strict=True):
        found[at].append(value)
    return {at: np.array(values) for at, values in found.items()}
