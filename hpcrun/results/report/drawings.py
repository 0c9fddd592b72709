"""All figures of a report, in their order on the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpcrun.results.report.bands import sampled
from hpcrun.results.report.figures.canvas import Drawing
from hpcrun.results.report.figures.curves import (
    LegendEntry,
    curve_figure,
    entries_of,
    single_entries,
)
from hpcrun.results.report.figures.sweeps import parallel_figure, sensitivity_figure
from hpcrun.results.report.figures.times import goodput_figures, timeline_figures
from hpcrun.results.report.report_content import Content
from hpcrun.results.report.runs import ReportedRun

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
        curves=_curves(list(metrics), entries),
        relations=_relations(content),
        parallel=_parallel(content),
        throughput=_curves(throughputs(content.runs), entries),
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


def _curves(metrics: Sequence[str], entries: Sequence[LegendEntry]) -> list[Drawing]:
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
