"""Curves and goodput of some runs in one figure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpcrun.results.report.canvas import OTHERS, SERIES, Drawing, count_axis, label, log_axis, style
from hpcrun.results.report.curves import (
    LegendEntry,
    curve_figure,
    entries_of,
    metric_label,
    single_entries,
)
from hpcrun.results.report.efficiency import sampled, thinned, wants_log
from hpcrun.results.report.report_content import Content
from hpcrun.results.report.runs import ReportedRun
from hpcrun.results.report.sweep_figures import parallel_figure, sensitivity_figure
from hpcrun.results.report.times import PARTS, goodput_figures, timeline_figures

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


FINISHED = "finished"
MOST_PANELS = 12
"""Parameters with a panel each; all parameters are in the table of relations."""
MOST_ROWS = 80
"""Runs in timelines and goodput; all runs are in the tables. A figure of 40 takes seconds."""


@dataclass(frozen=True)
class Figures:
    """The figures by section."""

    curves: Sequence[Drawing]
    relations: Sequence[Drawing]
    parallel: Sequence[Drawing]
    throughput: Sequence[Drawing]
    goodput: Sequence[Drawing]
    timeline: Sequence[Drawing]

    def all(self) -> list[Drawing]:
        """Return all figures, in the order of the page."""
        return [
            *self.curves,
            *self.relations,
            *self.parallel,
            *self.throughput,
            *self.goodput,
            *self.timeline,
        ]


def draw(content: Content) -> Figures:
    """Draw all figures that the runs have data for."""
    entries = entries_of(content.groups, content.runs, lower=content.lower)
    entries = entries or single_entries(content.runs)
    metrics = dict.fromkeys(
        name for name in (content.metric, "validation_loss", "loss", "lr", "mfu") if name
    )
    rows = chosen_rows(content.runs)
    return Figures(
        curves=_drawings_curves(list(metrics), entries),
        relations=_relations(content),
        parallel=_parallel(content),
        throughput=_drawings_curves(throughputs(content.runs), entries),
        goodput=goodput_figures(rows),
        timeline=timeline_figures(rows),
    )


def chosen_rows(runs: Sequence[ReportedRun]) -> Sequence[ReportedRun]:
    """Return at most :data:`MOST_ROWS` runs: even samples of the finished runs and of the other runs."""
    if len(runs) <= MOST_ROWS:
        return runs
    unfinished = [run for run in runs if run.state != FINISHED]
    finished = [run for run in runs if run.state == FINISHED]
    bad = sampled(unfinished, max(MOST_ROWS // 2, MOST_ROWS - len(finished)))
    good = sampled(finished, MOST_ROWS - len(bad))
    chosen = {run.key for run in (*bad, *good)}
    return [run for run in runs if run.key in chosen]


def throughputs(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the names of the metrics that count units per second."""
    return sorted({run.throughput for run in runs if run.throughput})


def _drawings_curves(metrics: Sequence[str], entries: Sequence[LegendEntry]) -> list[Drawing]:
    found = []
    names: set[str] = set()
    for number, metric in enumerate(metrics, 1):
        name = f"curve-{file_name(metric)}"
        # Metrics with names in another script than Latin would get the same file name.
        name = f"{name}-{number}" if name in names else name
        names.add(name)
        found.append(curve_figure(name, metric, entries))
    return [drawing for drawing in found if drawing is not None]


def _relations(content: Content) -> list[Drawing]:
    alone = len(content.swept) == 1
    return [
        sensitivity_figure(
            f"sensitivity-{number}-{file_name(one.key)}", content.metric or "", one, alone=alone
        )
        for number, one in enumerate(content.relations[:MOST_PANELS], 1)
    ]


def _parallel(content: Content) -> list[Drawing]:
    known = [run for run in content.runs if run.config]
    values = {run.key: content.values[run.key] for run in known if run.key in content.values}
    found = parallel_figure(content.metric or "", known, values, content.swept, lower=content.lower)
    return [] if found is None else [found]


def file_name(text: str) -> str:
    """Return a foreign name as part of a file's name and of an id."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")[:40] or "x"
