"""The data of a report, read and computed once, before the page is written."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrun.errors import UserError
from hpcrun.printing import escaped
from hpcrun.results.groups import (
    SAME_TRAINING,
    Question,
    RunGroup,
    grouped,
    known_metrics,
    lower_is_better,
    seed_keys,
)
from hpcrun.results.report.runs import ReportedRun, iterate_runs
from hpcrun.results.report.words import several
from hpcrun.results.store import ResultsFile
from hpcrun.run.journal.events import Ended
from hpcrun.run.slow_nodes import SlowNode, slow_nodes

# Metrics about the progress of a run, not about its result.
_OF_THE_MACHINE = re.compile(
    r"lr|learning_rate|mfu|memory_gb|step_time|data_wait|stop_wait|loss_scale|gradient_norm|skipped"
    r"|gpu_.*|lowest_gpu_.*|slowest_.*|fastest_.*|.*_per_second"
)
_MOST_METRICS = 16
MOST_CURVES = 1000
"""Runs with curves; all runs are in the tables."""
_MOST_POINTS, _POINTS = 400, 40_000
"""Rows of a run, and of all runs: 24 runs stay below 2 MB."""
_ORIGIN = ("git.commit", "user", "executor", "state")

# The command of a script, which has the swept values.
_COMMAND = re.compile(r"(?<=ScriptFailed: ).*? (?=ended with exit code|was killed by)")


@dataclass(frozen=True)
class Content:
    """The content of a report.

    Args:
        metric: the first metric of the page; None if no run has a metric.
        values: the metric of each run, whether or not the run counts.
        swept: keys of the config in which runs differ.
        why: the reason why a run does not count, by its key.
        data: the data of the page's figures, as JSON takes them.
        problems: run, file and problem.
        read: Unix seconds at which the run directories were read.
    """

    title: str
    runs: Sequence[ReportedRun]
    metric: str | None
    at: str
    values: Sequence[float | None]
    swept: Sequence[str]
    why: Mapping[str, str]
    data: Mapping[str, Any]
    problems: Sequence[tuple[str, str, str]]
    read: float
    written: float

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
        """The slow nodes of all attempts, each with the name of its run."""
        return [(run.label, one) for run in self.runs for one in slow_nodes(run.journal)]

    @property
    def ends(self) -> Sequence[tuple[str, int]]:
        """The number of attempts that ended by each cause, the most frequent first."""
        events = [event for run in self.runs for event in run.journal.of_kind(Ended)]
        return Counter(event.cause or "unknown" for event in events).most_common()

    @property
    def unfinished(self) -> Sequence[tuple[tuple[str, str, str], Sequence[str]]]:
        """State, cause and reason of the runs that have not finished, each with its runs; most runs first."""
        found = defaultdict(list)
        for run in self.runs:
            if run.state != "finished":
                reason = _COMMAND.sub("", run.reason)
                found[run.state, run.cause, reason].append(run.label)
        return sorted(found.items(), key=lambda one: -len(one[1]))


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
        UserError: there are no runs.
        ResultsError: no run has the requested metric.
    """
    count = len(store.table("runs"))
    if not count:
        raise UserError(f"{store.path}: contains no runs; collect some with `hpcrun aggregate`")
    metrics = _metrics(store, request.metric)
    metric = next(iter(metrics), None)
    lower = {name: lower_is_better(name) for name in metrics}
    groups: list[RunGroup] = []
    if metric is not None:
        if request.goal:
            lower[metric] = request.goal == "min"
        question = Question(metric, request.at, lower[metric], request.seed_key)
        if request.by:
            grouped(store, replace(question, by=request.by))  # Refuses keys that no run has.
        groups = grouped(store, question)
    results = {one.run: one.value for group in groups for one in group.values}
    why = {key: reason for group in groups for key, _, reason in group.left_out}
    summary = {(row["run"], row["metric"]): row for row in store.table("summary")}
    runs: list[ReportedRun] = []
    entries: list[dict[str, Any]] = []
    for number, run in enumerate(iterate_runs(store)):
        key = run.key.encode()
        values = {
            name: _value(run, name, summary.get((key, name.encode())), request.at, lower[name])
            for name in metrics
        }
        if metric is not None and metric.startswith("result."):
            values[metric] = results.get(run.key)
        # A finished run with a value that does not count is an older run of the same config and seed.
        twin = run.key in why and values.get(metric or "") is not None
        # An even sample of the runs has curves.
        curves = count <= MOST_CURVES or number * MOST_CURVES % count < MOST_CURVES
        entry = {
            "name": escaped(run.label),
            "state": run.state,
            "counts": run.state == "finished" and not twin,
            "values": values,
            "tracks": _tracks(run, metrics, _POINTS // min(count, MOST_CURVES)) if curves else [],
        }
        entries.append(entry)
        runs.append(replace(run, columns={}))
    swept = swept_keys(runs, request.seed_key)
    facts = [_facts(run, request.seed_key) for run in runs]
    keys = [
        key
        for key in dict.fromkeys([*swept, *(request.by or ()), "seed", *_ORIGIN])
        if key in swept or len({str(one.get(key)) for one in facts}) > 1
    ]
    for entry, own in zip(entries, facts, strict=True):
        entry["keys"] = {key: own.get(key, "absent") for key in keys} | {"seed": own["seed"]}
    return Content(
        title=request.title or f"Report of {several(count, 'run')}",
        runs=runs,
        metric=metric,
        at=request.at,
        values=[entry["values"].get(metric) for entry in entries],
        swept=swept,
        why=why,
        data={
            "metric": metric,
            "metrics": metrics,
            "lower": lower,
            "keys": keys,
            "by": [key for key in request.by or swept if key in keys],
            "pair": [key for key in keys if key in swept or key == "seed"],
            "x": [name for name in _X if any(name in t["x"] for e in entries for t in e["tracks"])],
            "runs": entries,
        },
        problems=[
            (run.decode(), file.decode(), problem.decode())
            for run, file, problem in store.table("problems").tolist()
        ],
        read=float(store.file.attrs.get("written", 0.0)),
        written=time.time(),
    )


def _metrics(store: ResultsFile, first: str | None) -> list[str]:
    """Return the metrics of the page: results, the learning rate, rates, other facts about the machine."""

    def place(name: str) -> tuple[Any, ...]:
        main = {"validation_loss": 0, "loss": 1}.get(name, 2)
        rate = name.endswith("_per_second")
        return bool(_OF_THE_MACHINE.fullmatch(name)), main, name != "lr", not rate

    known = sorted((name for name in known_metrics(store) if name not in _CLOCKS), key=place)
    return list(dict.fromkeys([first, *known] if first else known))[:_MOST_METRICS]


def _facts(run: ReportedRun, seed_key: str) -> dict[str, Any]:
    """Return the values by which runs are grouped: numbers and texts."""
    found: dict[str, Any] = {}
    for key, value in run.config.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        found[key] = value if number and math.isfinite(value) else escaped(shown(value))
    git = run.identity.get("git")
    seeds = [found[key] for key in sorted(seed_keys(run.config, seed_key)) if key in found]
    return found | {
        "seed": next((one for one in seeds if isinstance(one, int | float)), None),
        "git.commit": str(git.get("commit", ""))[:12] if isinstance(git, dict) else "",
        "user": str(run.identity.get("user", "")),
        "executor": run.executor,
        "state": run.state,
    }


def _value(run: ReportedRun, metric: str, row: Any, at: str, lower: bool) -> float | None:
    """Return the metric of a run at the moment ``at``; None without it, and after a last value of NaN."""
    if row is None or not np.isfinite(row["last"]):
        return None
    if at.isdigit():
        steps, values = run.series(metric)
        here = values[steps == int(at)]
        return float(here[-1]) if len(here) else None
    return float(row["last"] if at == "last" else row["min"] if lower else row["max"])


_X = ("step", "samples", "tokens", "time")
# W&B and Lightning log them in each row; they only grow.
_CLOCKS = {*_X, "epoch", "runtime", "_runtime", "_step", "_timestamp"}


def _tracks(run: ReportedRun, metrics: Sequence[str], most: int) -> list[dict[str, Any]]:
    """Return the curves of a run: a track for the rows of training, for those of validation, and so on.

    A track has its values of x by name, and those of each metric with values in exactly these rows. Of more
    rows than ``most``, those with the lowest and highest first metric of each chunk stay.
    """
    columns = run.columns
    found: dict[bytes, list[str]] = {}
    for name in metrics:
        if name in columns and (mask := np.isfinite(columns[name])).any():
            found.setdefault(mask.tobytes(), []).append(name)
    if not found:
        return []
    steps = columns.get("step", np.arange(len(columns[next(iter(found.values()))[0]])))
    along = {"step": steps}
    batch, context = run.config.get("train.batch_size"), run.config.get("model.context")
    if "samples" in columns or isinstance(batch, int):
        along["samples"] = columns["samples"] if "samples" in columns else steps * batch
    if "tokens" in columns:
        along["tokens"] = columns["tokens"]
    elif "tokens_per_second" in columns and isinstance(context, int) and "samples" in along:
        along["tokens"] = along["samples"] * context
    if "time" in columns:
        # Hours since the first logged row.
        along["time"] = (columns["time"] - np.nanmin(columns["time"])) / 3600
    tracks = []
    for mark, names in found.items():
        index = np.flatnonzero(np.frombuffer(mark, bool) & np.isfinite(steps))
        index = index[np.argsort(steps[index], kind="stable")]
        index = index[thinned(columns[names[0]][index], min(most, _MOST_POINTS))]
        x = {name: _numbers(column[index], 10) for name, column in along.items()}
        y = {name: _numbers(columns[name][index], 6) for name in names}
        tracks.append({"x": x, "y": y})
    return tracks


def thinned(values: NDArray[Any], most: int) -> NDArray[np.int64]:
    """Return at most ``most`` indices of a curve: the ends, the lowest and highest of each chunk."""
    if len(values) <= most:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for chunk in np.array_split(np.arange(len(values)), most // 2 - 1):
        kept |= {int(chunk[values[chunk].argmin()]), int(chunk[values[chunk].argmax()])}
    return np.array(sorted(kept))


def _numbers(values: NDArray[Any], digits: int) -> list[float | None]:
    """Return numbers for JSON with few digits; None replaces a value that is not finite."""
    return [
        None
        if not np.isfinite(value)
        else int(value)
        if value == int(value)
        else float(f"{value:.{digits}g}")
        for value in values.tolist()
    ]


def swept_keys(runs: Sequence[ReportedRun], seed_key: str = "seed") -> list[str]:
    """Return the keys of the config in which runs with a config differ, without the seed."""
    known = [run for run in runs if run.config]
    left_out = {"name", "command"}
    left_out.update(*(seed_keys(run.config, seed_key) for run in known))
    keys = dict.fromkeys(key for run in known for key in run.config)
    # An empty section, such as model, is a key of the runs that have none of its keys.
    left_out.update(key.rpartition(".")[0] for key in keys)
    return [
        key
        for key in keys
        if key not in left_out
        and not key.startswith(SAME_TRAINING)
        and len({shown(run.config.get(key)) for run in known}) > 1
    ]


def shown(value: Any) -> str:
    """Return a value of the config in a few words."""
    if isinstance(value, str):
        return value
    return f"{value:.12g}" if isinstance(value, float) else json.dumps(value, default=str)
