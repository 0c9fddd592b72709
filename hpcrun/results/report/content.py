"""The data of a report, read and computed once, before any figure is drawn."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrun.errors import ResultsError
from hpcrun.results.groups import (
    SAME_TRAINING,
    Question,
    RunGroup,
    default_metric,
    grouped,
    known_metrics,
    lower_is_better,
    seed_keys,
)
from hpcrun.results.report.runs import (
    ReportedRun,
    ReportError,
    read_runs,
)
from hpcrun.results.statistics import Spread, describe
from hpcrun.results.store import ResultsFile
from hpcrun.run.slow_nodes import SlowNode, slow_nodes

# Metrics about the progress of a run, not about its result.
_OF_THE_MACHINE = re.compile(
    r"lr|learning_rate|mfu|memory_gb|step_time|data_wait|stop_wait|loss_scale|gradient_norm|skipped"
    r"|gpu_.*|slowest_.*|fastest_.*|.*_per_second"
)


@dataclass(frozen=True)
class RankedGroup:
    """The runs of one config, with the statistics of those that count; None: no run counts."""

    group: RunGroup
    spread: Spread | None


@dataclass(frozen=True)
class Content:
    """The content of a report.

    Args:
        metric: None if no run has a metric.
        groups: by config, the best first; empty without a metric.
        values: the metric of each run that counts.
        swept: keys of the config in which runs differ.
        problems: run, file and problem.
        read: Unix seconds at which the run directories were read.
    """

    title: str
    runs: Sequence[ReportedRun]
    metric: str | None
    lower: bool
    at: str
    groups: Sequence[RankedGroup]
    values: Mapping[str, float]
    swept: Sequence[str]
    problems: Sequence[tuple[str, str, str]]
    read: float
    written: float

    def value(self, run: ReportedRun) -> float | None:
        """Return the metric of a run, whether or not the run counts."""
        if run.key in self.values:
            return self.values[run.key]
        steps, values = run.series(self.metric or "")
        if self.at.isdigit():
            values = values[steps == int(self.at)]
        if not len(values):
            return None
        if self.at == "best":
            return float(values.min() if self.lower else values.max())
        return float(values[-1])

    @property
    def shared_config(self) -> dict[str, str]:
        """The config that all runs with a config share."""
        known = [run.config for run in self.runs if run.config]
        return {
            key: shown(value)
            for key, value in (known[0].items() if known else ())
            if key != "name" and len({shown(config.get(key)) for config in known}) == 1
        }

    @property
    def slow(self) -> Sequence[tuple[str, SlowNode]]:
        """The slow nodes of all attempts, each with the key of its run."""
        return [(run.key, one) for run in self.runs for one in slow_nodes(run.events)]

    @property
    def ends(self) -> Sequence[tuple[str, int]]:
        """The number of attempts that ended by each cause, the most frequent first."""
        events = [event for run in self.runs for event in run.events if event.what == "ended"]
        return Counter(event.cause or "unknown" for event in events).most_common()


@dataclass(frozen=True)
class ReportRequest:
    """The options of a report; None: chosen from the data."""

    title: str | None = None
    metric: str | None = None
    goal: str | None = None
    at: str = "last"
    by: Sequence[str] | None = None
    seed_key: str = "seed"


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
    groups = []
    if metric is not None:
        question = Question(metric, request.at, lower, request.seed_key, (), request.by)
        groups = _ranked(grouped(store, question), lower=lower)
    values = {value.run: value.value for one in groups for value in one.group.values}
    keys = list(request.by) if request.by else swept_keys(runs, request.seed_key)
    return Content(
        title=request.title or f"Report of {len(runs):,} run{'s' * (len(runs) > 1)}",
        runs=runs,
        metric=metric,
        lower=lower,
        at=request.at,
        groups=groups,
        values=values,
        swept=keys,
        problems=[
            (run.decode(), file.decode(), problem.decode())
            for run, file, problem in store.table("problems").tolist()
        ],
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


def _ranked(groups: Sequence[RunGroup], *, lower: bool) -> list[RankedGroup]:
    """Return the groups with their statistics, the best mean first; groups without a value come last."""
    found = [RankedGroup(one, describe(one.numbers()) if one.values else None) for one in groups]
    sign = 1 if lower else -1
    return sorted(
        found, key=lambda one: math.inf if one.spread is None else sign * one.spread.mean.value
    )


def swept_keys(runs: Sequence[ReportedRun], seed_key: str = "seed") -> list[str]:
    """Return the keys of the config in which runs with a config differ, without the seed."""
    known = [run for run in runs if run.config]
    left_out = {"name", "command"}
    left_out.update(*(seed_keys(run.config, seed_key) for run in known))
    return [
        key
        for key in dict.fromkeys(key for run in known for key in run.config)
        if key not in left_out
        and not key.startswith(SAME_TRAINING)
        and len({shown(run.config.get(key)) for run in known}) > 1
    ]


def shown(value: Any) -> str:
    """Return a value of the config in a few words."""
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str)
