"""The data of a report, read and computed once, before any figure is drawn."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcrun.errors import ResultsError
from hpcrun.results.groups import (
    Question,
    RunGroup,
    default_metric,
    grouped,
    known_metrics,
    lower_is_better,
)
from hpcrun.results.report.efficiency import Efficiency, ask_sacct, efficiencies
from hpcrun.results.report.runs import (
    ReportedRun,
    ReportError,
    RunFailure,
    interruptions,
    read_runs,
    run_failures,
)
from hpcrun.results.report.sweep import Sensitivity, sensitivities, several, swept_keys
from hpcrun.results.store import ResultsFile

# Metrics about the progress of a run, not about its result.
_OF_THE_MACHINE = re.compile(
    r"lr|learning_rate|mfu|memory_gb|step_time|data_wait|loss_scale|gradient_norm|skipped"
    r"|gpu_.*|slowest_.*|fastest_.*|.*_per_second"
)


@dataclass(frozen=True)
class Content:
    """The content of a report.

    Args:
        metric: None if no run has a metric.
        groups: by config; empty without a metric.
        values: the metric of each run that counts.
        swept: keys of the config in which runs differ, the strongest relation first.
        sacct_note: the reason for missing data of sacct; empty: nothing is missing, or sacct was not needed.
        problems: run, file and problem.
        read: Unix seconds at which the run directories were read.
    """

    title: str
    runs: Sequence[ReportedRun]
    metric: str | None
    lower: bool
    at: str
    groups: Sequence[RunGroup]
    values: Mapping[str, float]
    swept: Sequence[str]
    relations: Sequence[Sensitivity]
    failures: Sequence[RunFailure]
    interruptions: Mapping[str, int]
    efficiency: Sequence[Efficiency]
    sacct_note: str
    problems: Sequence[tuple[str, str, str]]
    read: float
    written: float


@dataclass(frozen=True)
class ReportRequest:
    """The options of a report; None: chosen from the data."""

    title: str | None = None
    metric: str | None = None
    goal: str | None = None
    at: str = "last"
    by: Sequence[str] | None = None
    seed_key: str = "seed"
    sacct: bool = True


def collect(store: ResultsFile, request: ReportRequest) -> Content:
    """Return the content of a report.

    Raises:
        ReportError: there are no runs.
        ResultsError: no run has the requested metric.
    """
    metric = request.metric or _metric(store)
    runs = read_runs(store, *([metric] if metric else []))
    if not runs:
        raise ReportError(f"{store.path}: contains no runs; collect some with `hpcrun aggregate`")
    lower = request.goal == "min" if request.goal else metric is None or lower_is_better(metric)
    groups = _groups(store, metric, lower, request)
    values = {value.run: value.value for group in groups for value in group.values}
    keys = list(request.by) if request.by else swept_keys(runs, request.seed_key)
    relations = sensitivities(runs, values, keys)
    strongest = [one.key for one in relations]
    usage, note = ask_sacct(runs) if request.sacct else ({}, "sacct was not called (--no-sacct)")
    return Content(
        title=request.title or f"Report of {several(len(runs), 'run')}",
        runs=runs,
        metric=metric,
        lower=lower,
        at=request.at,
        groups=groups,
        values=values,
        swept=[*strongest, *(key for key in keys if key not in strongest)],
        relations=relations,
        failures=run_failures(runs),
        interruptions=interruptions(runs),
        efficiency=efficiencies(runs, usage),
        sacct_note=note,
        problems=_problems(store),
        read=float(store.file.attrs.get("written", 0.0)),
        written=time.time(),
    )


def _metric(store: ResultsFile) -> str | None:
    """Return the metric to compare by; None if no run has logged a number."""
    try:
        return default_metric(store)
    except ResultsError:
        known = known_metrics(store)
        results = [name for name in known if not _OF_THE_MACHINE.fullmatch(name)]
        return next(iter(results or known), None)


def _groups(
    store: ResultsFile, metric: str | None, lower: bool, request: ReportRequest
) -> list[RunGroup]:
    if metric is None:
        return []
    question = Question(metric, request.at, lower, request.seed_key, (), request.by)
    return grouped(store, question)


def _problems(store: ResultsFile) -> list[tuple[str, str, str]]:
    rows = store.table("problems")
    return [(row["run"].decode(), row["file"].decode(), row["problem"].decode()) for row in rows]
