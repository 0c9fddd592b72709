"""Dependence of the metric on the swept parameters: one panel each, and parallel coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrun.results.report.canvas import (
    BLUE,
    INK,
    MUTED,
    OTHERS,
    PAPER,
    RAMP,
    VERMILION,
    Drawing,
    label,
    log_axis,
    new_figure,
    style,
)
from hpcrun.results.report.curves import metric_label
from hpcrun.results.report.efficiency import wants_log
from hpcrun.results.report.runs import ReportedRun
from hpcrun.results.report.sweep import Sensitivity, number, several, shown

_MOST_AXES = 8
_MOST_TICKS = 9
_MOST_NAMES = 16
_NOTHING = "not counted"
_BEHIND = {"boxstyle": "square,pad=0.12", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.8}


def sensitivity_figure(name: str, metric: str, one: Sensitivity, *, alone: bool) -> Drawing:
    """Return the metric of each run against one parameter, with means where runs share a value.

    Args:
        alone: no other parameter differs.
    """
    with style():
        figure, (axes,) = new_figure(height=2.5)
        axes.plot(one.x, one.y, "o", color=BLUE, ms=3.5, alpha=0.6, mew=0, gid="runs")
        for at, interval in one.means:
            if interval.low is not None and interval.high is not None:
                axes.plot([at, at], [interval.low, interval.high], color=VERMILION, lw=1.2)
            axes.plot([at], [interval.value], "D", color=VERMILION, ms=4.5, mew=0)
        _scale_x(axes, one)
        if wants_log([one.y]):
            axes.set_yscale("log")
            log_axis(axes.yaxis)
        axes.set_xlabel(label(one.key))
        axes.set_ylabel(label(metric_label(metric), 30))
    return Drawing(name, f"{metric} against {one.key}", _caption(one, alone=alone), figure)


def _scale_x(axes: Any, one: Sensitivity) -> None:
    if one.numbers:
        if (one.x > 0).all() and one.x.max() / one.x.min() >= 8:
            axes.set_xscale("log")
            log_axis(axes.xaxis)
        values = np.unique(one.x)
        if len(values) <= _MOST_TICKS:
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.minorticks_off()
        return
    ticks = _few([(at, label(name, 18)) for at, name in enumerate(one.labels)], _MOST_NAMES)
    places, names = zip(*ticks, strict=True)
    if sum(map(len, names)) > 48:
        axes.set_xticks(places, names, rotation=35, ha="right", rotation_mode="anchor")
    else:
        axes.set_xticks(places, names)
    axes.set_xlim(-0.5, len(one.labels) - 0.5)


def _caption(one: Sensitivity, *, alone: bool) -> str:
    words = [f"{label(one.key)}, n = {len(one.y)} finished runs (dots)."]
    if one.means:
        words.append("Diamonds: mean at a value, with its 95% t-interval where n > 1.")
    if one.rho is not None:
        words.append(f"Rank correlation ρ = {one.rho:+.2f}.")
    if one.eta is not None:
        words.append(f"Share of the variance between values η² = {one.eta:.2f}.")
    if not alone:
        words.append("Other parameters differ between these runs as well.")
    return " ".join(words)


def parallel_figure(
    metric: str,
    runs: Sequence[ReportedRun],
    values: Mapping[str, float],
    keys: Sequence[str],
    *,
    lower: bool,
) -> Drawing | None:
    """Return parallel coordinates of ``keys`` and the metric; None for fewer than two runs or keys.

    Runs without a value are gray and end below the axis of the metric.
    """
    shown_keys = list(keys[:_MOST_AXES])
    if len(shown_keys) < 2 or len(runs) < 2 or not values:
        return None
    with style():
        figure, (axes,) = new_figure(9.4, 3.6)
        places = [_places([run.config.get(key) for run in runs]) for key in shown_keys]
        lines = np.array([place for place, _ in places])
        heights, ticks = _metric_places(runs, values)
        titles = _draw_lines(axes, runs, values, lines, heights, lower=lower)
        for at, (_, marks) in enumerate(places):
            _axis(axes, at, marks, label(shown_keys[at], 22))
        _axis(axes, len(places), ticks, label(metric_label(metric), 22))
        axes.set_axis_off()
        axes.set_xlim(-0.25, len(places) + 0.35)
        axes.set_ylim(-0.2, 1.12)
    left = len(keys) - len(shown_keys)
    caption = (
        "Each line is a run. Colors: the metric, from worst (dark) to best (light). "
        "Gray, ending below the axis: "
        f"{several(len(runs) - len(values), 'run')} without a value that counts."
        + (
            f" {left} more parameters differ, which have a weaker relation to the metric."
            if left
            else ""
        )
    )
    return Drawing("parallel", "Parallel coordinates", caption, figure, titles, wide=True)


def _draw_lines(
    axes: Any,
    runs: Sequence[ReportedRun],
    values: Mapping[str, float],
    lines: NDArray[np.float64],
    heights: Sequence[float],
    *,
    lower: bool,
) -> dict[str, str]:
    titles: dict[str, str] = {}
    ranks = _ranks(values, lower=lower)
    # The best runs are drawn last.
    order = sorted(range(len(runs)), key=lambda at: ranks.get(runs[at].key, -1))
    for at in order:
        run = runs[at]
        path = np.append(lines[:, at], heights[at])
        color, width, gid = OTHERS, 0.7, f"line{at}"
        if run.key in ranks:
            color, width = RAMP[min(int(ranks[run.key] * len(RAMP)), len(RAMP) - 1)], 1.1
        axes.plot(range(len(path)), path, color=color, lw=width, alpha=0.85, gid=gid)
        value = values.get(run.key)
        titles[gid] = f"{run.key}: {_NOTHING if value is None else f'{value:.5g}'}"
    return titles


def _ranks(values: Mapping[str, float], *, lower: bool) -> dict[str, float]:
    """Return the place of each run from 0 (worst) to 1 (best)."""
    ordered = sorted(values, key=lambda key: -values[key] if lower else values[key])
    return {key: at / max(len(ordered) - 1, 1) for at, key in enumerate(ordered)}


def _places(cells: Sequence[Any]) -> tuple[NDArray[np.float64], list[tuple[float, str]]]:
    """Return the height of each value on an axis (0 to 1), and the ticks of the axis."""
    numbers = [number(cell) for cell in cells]
    if all(one is not None for one in numbers):
        found = np.array(numbers, np.float64)
        return _scaled(found, log=bool(found.min() > 0 and found.max() / found.min() >= 8))
    names = sorted({shown(cell) for cell in cells})
    step = 1 / max(len(names) - 1, 1)
    heights = np.array([names.index(shown(cell)) * step for cell in cells])
    chosen = _few([(at * step, label(name, 16)) for at, name in enumerate(names)])
    return heights, chosen


def _scaled(
    found: NDArray[np.float64], *, log: bool
) -> tuple[NDArray[np.float64], list[tuple[float, str]]]:
    scale = np.log(found) if log else found
    low, high = float(scale.min()), float(scale.max())
    span = (high - low) or 1.0
    heights: NDArray[np.float64] = (scale - low) / span
    values = np.unique(found)
    if len(values) <= _MOST_TICKS:
        ticks = [((float(np.log(v) if log else v) - low) / span, f"{v:.4g}") for v in values]
        return heights, _apart(ticks)
    marks = np.linspace(low, high, 5)
    return heights, [((m - low) / span, f"{np.exp(m) if log else m:.3g}") for m in marks.tolist()]


def _metric_places(
    runs: Sequence[ReportedRun], values: Mapping[str, float]
) -> tuple[list[float], list[tuple[float, str]]]:
    found = np.array(list(values.values()))
    log = wants_log([found])
    heights, ticks = _scaled(found, log=log)
    by_key = dict(zip(values, heights.tolist(), strict=True))
    missing = any(run.key not in by_key for run in runs)
    if len(ticks) > 5:
        scale = np.linspace(
            float(np.log(found.min()) if log else found.min()),
            float(np.log(found.max()) if log else found.max()),
            5,
        )
        ticks = [(at / 4, f"{np.exp(v) if log else v:.4g}") for at, v in enumerate(scale.tolist())]
    return [by_key.get(run.key, -0.14) for run in runs], ticks + (
        [(-0.14, _NOTHING)] if missing else []
    )


def _few(ticks: list[tuple[float, str]], most: int = _MOST_TICKS) -> list[tuple[float, str]]:
    if len(ticks) <= most:
        return ticks
    index = np.unique(np.linspace(0, len(ticks) - 1, most).astype(int))
    return [ticks[at] for at in index]


def _apart(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Remove ticks with labels that would cover each other."""
    kept: list[tuple[float, str]] = []
    for tick in ticks:
        if not kept or tick[0] - kept[-1][0] > 0.06:
            kept.append(tick)
    return kept


def _axis(axes: Any, at: int, ticks: Sequence[tuple[float, str]], name: str) -> None:
    axes.plot([at, at], [0, 1], color=MUTED, lw=0.9, zorder=3)
    axes.text(at, 1.05, name, ha="center", va="bottom", fontsize=8, fontweight="bold", color=INK)
    for height, words in ticks:
        axes.plot([at, at + 0.02], [height, height], color=MUTED, lw=0.9, zorder=3)
        axes.text(
            at + 0.035,
            height,
            words,
            ha="left",
            va="center",
            fontsize=7,
            color=INK,
            zorder=5,
            bbox=_BEHIND,
        )
