"""Curves and goodput of some runs in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpcrun.results.report.bands import thinned, wants_log
from hpcrun.results.report.figures.canvas import OTHERS, SERIES, count_axis, label, log_axis, style
from hpcrun.results.report.figures.curves import metric_label
from hpcrun.results.report.figures.times import PARTS
from hpcrun.results.report.runs import ReportedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLES = ("-", (0, (4, 1.5)), (0, (1, 1)))
_MOST_NAMES = len(SERIES) * len(_STYLES)


def panels_figure(runs: Sequence[ReportedRun], metrics: Sequence[str]) -> Figure | None:
    """Return a panel for each metric and one for goodput; None if there is nothing to draw."""
    from matplotlib.figure import Figure

    timed = [run for run in runs if run.events and run.wall > 0]
    panels = len(metrics) + bool(timed)
    if not panels:
        return None
    rows = -(-panels // 2)
    with style():
        height = 2.3 * rows + 0.13 * min(len(runs), _MOST_NAMES) * (len(runs) > 1)
        figure = Figure(figsize=(8.6, height), layout="constrained")
        axes = list(figure.subplots(rows, 2, squeeze=False).flat)
        for at, metric in enumerate(metrics):
            _curves(axes[at], runs, metric)
        if timed:
            _goodput(axes[len(metrics)], timed)
        for spare in axes[panels:]:
            spare.set_axis_off()
        if len(runs) > 1:
            _names(figure, runs)
    return figure


def _curves(axes: Any, runs: Sequence[ReportedRun], metric: str) -> None:
    for at, run in enumerate(runs):
        x, y = thinned(*run.series(metric))
        color, dash = _look(at)
        axes.plot(x, y, color=color, ls=dash, lw=1.2, marker="o" if len(x) == 1 else None)
    values = [run.series(metric)[1] for run in runs]
    if wants_log(values):
        axes.set_yscale("log")
        log_axis(axes.yaxis)
    elif metric.endswith("_per_second"):
        axes.set_ylim(
            0, 1.05 * max((float(one.max()) for one in values if len(one)), default=1) or 1
        )
        count_axis(axes.yaxis)
    count_axis(axes.xaxis)
    axes.set_xlabel("step")
    axes.set_ylabel(label(metric_label(metric)))


def _goodput(axes: Any, runs: Sequence[ReportedRun]) -> None:
    for at, run in enumerate(runs):
        parts, left = asdict(run.goodput), 0.0
        for part, (color, words) in PARTS.items():
            share = 100 * parts[part] / run.wall
            axes.barh(
                at, share, left=left, height=0.7, color=color, lw=0, label=words if not at else None
            )
            left += share
    size = 7 if len(runs) <= 14 else 5
    axes.set_yticks(range(len(runs)), [label(run.label, 22) for run in runs], fontsize=size)
    axes.set_ylim(max(len(runs), 3) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("goodput: share of the run's time (%)")
    axes.legend(ncols=2, fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _names(figure: Any, runs: Sequence[ReportedRun]) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for at, run in enumerate(runs[:_MOST_NAMES]):
        color, dash = _look(at)
        name = f"{label(run.label, 60)} ({run.state})"
        handles.append(Line2D([], [], color=color, ls=dash, label=name))
    if len(runs) > _MOST_NAMES:
        more = f"{len(runs) - _MOST_NAMES} more runs"
        handles.append(Line2D([], [], color=OTHERS, label=more))
    figure.legend(handles=handles, loc="outside lower left", ncols=2)


def _look(at: int) -> tuple[str, Any]:
    if at >= _MOST_NAMES:
        return OTHERS, "-"
    return SERIES[at % len(SERIES)], _STYLES[at // len(SERIES)]
