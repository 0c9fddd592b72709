"""Curves over steps: one line for each config, with a band over its seeds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcrun.results.groups import RunGroup
from hpcrun.results.report.canvas import (
    OTHERS,
    SERIES,
    Drawing,
    count_axis,
    label,
    log_axis,
    new_figure,
    style,
)
from hpcrun.results.report.efficiency import band, members, sampled, thinned, wants_log
from hpcrun.results.report.runs import ReportedRun

_MOST_LINES = 24
"""Thin lines of single runs; more of them hide the bands."""
_MOST_GRAY = 60
"""Gray lines of configs without a color, and dashed lines of runs that do not count."""
_LEAST = 1e-300
_NAMES = {
    "loss": ("training loss", ""),
    "validation_loss": ("validation loss", ""),
    "lr": ("learning rate", ""),
    "mfu": ("model FLOP/s utilization", ""),
    "memory_gb": ("memory of the largest rank", "GB"),
    "step_time": ("time of a step", "s"),
}


@dataclass(frozen=True)
class LegendEntry:
    """Runs that share one color.

    Args:
        counting: the runs of the band.
        others: runs of the same config that do not count, drawn thin.
    """

    name: str
    counting: Sequence[ReportedRun]
    others: Sequence[ReportedRun] = field(default_factory=tuple)


def entries_of(
    groups: Sequence[RunGroup], runs: Sequence[ReportedRun], *, lower: bool = True
) -> list[LegendEntry]:
    """Return an entry for each group, the best group first; groups without a value come last."""

    def rank(group: RunGroup) -> float:
        numbers = group.numbers()
        if not numbers:
            return float("inf")
        mean = sum(numbers) / len(numbers)
        return mean if lower else -mean

    ordered = sorted(groups, key=rank)
    return [LegendEntry(group.label, *members(group, runs)) for group in ordered]


def single_entries(runs: Sequence[ReportedRun]) -> list[LegendEntry]:
    """Return an entry for each run."""
    return [LegendEntry(run.label, [run]) for run in runs]


def metric_label(metric: str) -> str:
    """Return a metric in words, with its unit."""
    if metric.endswith("_per_second"):
        return f"{metric.removesuffix('_per_second').replace('_', ' ')} per second (1/s)"
    words, unit = _NAMES.get(metric, (metric.replace("_", " "), ""))
    return f"{words} ({unit})" if unit else words


def capitalized(words: str) -> str:
    """Return words with a capital first letter; the other letters stay (``mAP``)."""
    return words[:1].upper() + words[1:]


def curve_figure(name: str, metric: str, entries: Sequence[LegendEntry]) -> Drawing | None:
    """Return the curves of ``metric``; None if no run has a value.

    More configs than colors: the first ones have colors, and the others are thin gray lines.
    """
    found = [entry for entry in entries if any(len(_series(run, metric)[0]) for run in _all(entry))]
    if not found:
        return None
    with style():
        return _drawn(name, metric, found)


def _drawn(name: str, metric: str, entries: Sequence[LegendEntry]) -> Drawing:
    colored, gray = entries[: len(SERIES)], entries[len(SERIES) :]
    rows = len(colored) + bool(gray)
    figure, (axes,) = new_figure(height=2.5 + 0.155 * rows if rows > 1 else 2.5)
    titles: dict[str, str] = {}
    lines = sum(len(_all(entry)) for entry in entries)
    drawn = sampled(gray, _MOST_GRAY)
    shown = _shown_others([*colored, *drawn], metric)
    for at, entry in enumerate(drawn):
        _draw(axes, metric, entry, OTHERS, f"gray{at}", titles, shown, thin=True)
    for at, entry in enumerate(colored):
        few = lines <= _MOST_LINES
        _draw(axes, metric, entry, SERIES[at], f"series{at}", titles, shown, runs=few)
    values = [_series(run, metric)[1] for entry in entries for run in _all(entry)]
    if wants_log(values):
        # The lower end of an interval may be below zero, which a logarithmic axis cannot show.
        found = np.concatenate(values)
        axes.set_yscale("log")
        axes.set_ylim(found.min() / 1.3, found.max() * 1.3)
        log_axis(axes.yaxis)
    elif metric.endswith("_per_second"):
        axes.set_ylim(0, 1.05 * max(float(one.max()) for one in values if len(one)) or 1)
        count_axis(axes.yaxis)
    count_axis(axes.xaxis)
    axes.set_xlabel("step")
    axes.set_ylabel(metric_label(metric))
    if rows > 1:
        _legend(figure, colored, gray, metric)
    title = capitalized(metric_label(metric).partition(" (")[0])
    return Drawing(name, title, _caption(metric, entries, gray, len(shown)), figure, titles)


def _draw(
    axes: Any,
    metric: str,
    entry: LegendEntry,
    color: str,
    gid: str,
    titles: dict[str, str],
    shown: Collection[str],
    *,
    thin: bool = False,
    runs: bool = False,
) -> None:
    found = band([_series(run, metric) for run in entry.counting])
    for run in [
        *(entry.counting if found is None or (runs and found.n > 1) else ()),
        *(run for run in entry.others if run.key in shown),
    ]:
        x, y = thinned(*_series(run, metric))
        dashed = run in entry.others
        style_of = (0, (3, 2)) if dashed else "-"
        axes.plot(x, y, color=color, lw=0.6, alpha=0.55, ls=style_of, marker=_marker(x), ms=2)
    if found is None:
        return
    width = 0.7 if thin else 1.6
    (line,) = axes.plot(
        found.x, found.mean, color=color, lw=width, marker=_marker(found.x), gid=gid
    )
    titles[gid] = f"{entry.name}: n = {found.n}"
    line.set_alpha(0.6 if thin else 1.0)
    if found.low is not None and not thin:
        low = np.maximum(found.low, _LEAST) if (found.mean > 0).all() else found.low
        axes.fill_between(found.x, low, found.high, color=color, alpha=0.18, lw=0)


def _legend(
    figure: Any, colored: Sequence[LegendEntry], gray: Sequence[LegendEntry], metric: str
) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=SERIES[at], label=f"{label(entry.name, 56)}  {_count(entry, metric)}")
        for at, entry in enumerate(colored)
    ]
    if gray:
        text = f"{len(gray)} more"
        handles.append(Line2D([], [], color=OTHERS, lw=0.7, label=text))
    figure.legend(handles=handles, loc="outside lower left", ncols=1, labelspacing=0.25)


def _count(entry: LegendEntry, metric: str) -> str:
    n = sum(bool(len(_series(run, metric)[0])) for run in entry.counting)
    rest = sum(bool(len(_series(run, metric)[0])) for run in entry.others)
    words = [f"n={n}" if n else "", f"{rest} not finished" if rest else ""]
    return f"({', '.join(word for word in words if word)})"


def _caption(
    metric: str, entries: Sequence[LegendEntry], gray: Sequence[LegendEntry], dashed: int
) -> str:
    sizes = [sum(bool(len(_series(run, metric)[0])) for run in entry.counting) for entry in entries]
    parts = [f"{capitalized(metric_label(metric).partition(' (')[0])} over steps."]
    if max(sizes) > 1:
        parts.append(
            "Lines: mean over the finished runs of a config; bands: 95% t-interval of the mean over seeds, "
            "over the steps that all of these runs have. A config with n = 1 has no band."
        )
    if any(entry.others for entry in entries):
        whole = sum(len(_with_values(entry.others, metric)) for entry in entries)
        sample = f", an even sample of {dashed} of {whole}" if whole > dashed else ""
        parts.append(
            f"Dashed: runs that do not count (not finished, or a second run of a seed){sample}."
        )
    if gray:
        sample = f"an even sample of {_MOST_GRAY} of " if len(gray) > _MOST_GRAY else ""
        parts.append(
            f"Colors: the {len(SERIES)} best configs; gray: {sample}{len(gray)} more configs."
        )
    return " ".join(parts)


def _shown_others(entries: Sequence[LegendEntry], metric: str) -> set[str]:
    """Return the keys of the runs to draw among those that do not count: at least one of each entry."""
    others = [found for entry in entries if (found := _with_values(entry.others, metric))]
    if sum(map(len, others)) > _MOST_GRAY:
        each = max(1, _MOST_GRAY // len(others))
        others = [sampled(found, each) for found in others]
    return {run.key for found in others for run in found}


def _with_values(runs: Sequence[ReportedRun], metric: str) -> list[ReportedRun]:
    return [run for run in runs if len(_series(run, metric)[0])]


def _series(run: ReportedRun, metric: str) -> Any:
    return run.series(metric)


def _all(entry: LegendEntry) -> list[ReportedRun]:
    return [*entry.counting, *entry.others]


def _marker(x: Any) -> str | None:
    return "o" if len(x) == 1 else None
