"""Groups of runs with the same config, and the runs that do not count, with the reason."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrun.errors import ResultsError
from hpcrun.results.collect.columns import NO_STEP, counted, fields, flat
from hpcrun.results.store import ResultsFile
from hpcrun.run.sweep_file import is_sweep

SAME_TRAINING = ("job.", "restarts.", "checkpoint.", "watch.")
"""Sections that change where a run works and how often it saves, not what it computes."""
_MORE_IS_BETTER = re.compile(
    r"acc|auc|bleu|rouge|reward|return|score|precision|recall|_per_second|mfu|reached"
    r"|top[-_]?\d|psnr|ssim|success|win_?rate"
    # Whole words: "self1", "bitmap", "previous" and "indices" contain them.
    r"|(?<![a-z\d])f1(?![a-z\d])|(?<![a-z])(?:map|m?iou|dice)(?![a-z])"
)
_LESS_IS_BETTER = re.compile(r"(?<![a-z])(?:loss|error)(?![a-z])")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.-]*)\}")
BEST_IS_BIASED = (
    "the best of many noisy values is too good, more so with more values; it may choose another config than "
    "the last value"
)
"""A caution for results at the best step."""

_FINISHED = "finished"
_ABSENT = "absent"


@dataclass(frozen=True)
class Question:
    """The metric to compare, and which runs count.

    Args:
        at: ``last``, ``best`` or a step.
        lower: lower values are better.
        by: the config's keys that make a group; None: all but the seed.
    """

    metric: str
    at: str = "last"
    lower: bool = True
    seed_key: str = "seed"
    by: Sequence[str] | None = None


@dataclass(frozen=True)
class RunValue:
    """The metric of one run: ``value`` at ``step``, and the best one with its step.

    ``pair``: equal for two runs with the same seed and the same values of the keys that make no groups.
    """

    run: str
    pair: str
    seed: Any
    value: float
    step: int
    best: float
    best_step: int


@dataclass
class RunGroup:
    """The runs of one config. ``left_out``: runs that do not count, with the reason.

    Args:
        known: the file has the config of the runs, or the question names the keys.
    """

    label: str
    keys: dict[str, Any]
    known: bool
    values: list[RunValue] = field(default_factory=list)
    left_out: list[tuple[str, Any, str]] = field(default_factory=list)

    def numbers(self) -> list[float]:
        """Return the values that count."""
        return [one.value for one in self.values]


def lower_is_better(metric: str) -> bool:
    """Return the direction that the metric's name suggests."""
    name = metric.lower()
    # A loss may be named after a score: dice_loss.
    return bool(_LESS_IS_BETTER.search(name)) or not _MORE_IS_BETTER.search(name)


def default_metric(store: ResultsFile) -> str:
    """Return ``validation_loss`` if a run has it, else ``loss``.

    Raises:
        ResultsError: no run has either.
    """
    known = known_metrics(store)
    for name in ("validation_loss", "loss"):
        if name in known:
            return name
    raise ResultsError(
        f"no run has a loss; name a metric with --metric: {', '.join(known) or 'none'}"
    )


def known_metrics(store: ResultsFile) -> list[str]:
    """Return the names of all metrics."""
    return sorted({name.decode() for name in np.unique(store.table("summary")["metric"])})


def grouped(store: ResultsFile, question: Question) -> list[RunGroup]:
    """Return the groups, the best mean first; groups without a value come last.

    Raises:
        ResultsError: no run has the metric, or no config has a key.
    """
    runs = store.table("runs")
    found = _Values(store, question)
    groups: dict[str, RunGroup] = {}
    order = np.argsort(runs["created"], kind="stable")[::-1]
    for row in runs[order]:
        key = row["run"].decode()
        config, values = store.document(key, "config"), with_options(store.config(key))
        # The command with placeholders does not contain the seed.
        given = with_options({"command": config.get("command")})
        seed = given.get(_option(question.seed_key), values.get(question.seed_key))
        group_keys = _group_keys(values, question)
        has_keys = question.by is not None or bool(config)
        identity = json.dumps([has_keys, group_keys], sort_keys=True, default=str)
        group = groups.setdefault(identity, RunGroup("", group_keys, has_keys))
        rest = _group_keys(values, replace(question, by=None))
        rest = {name: value for name, value in rest.items() if name not in group_keys}
        pair = json.dumps([seed, rest], sort_keys=True, default=str) if seed is not None else key
        _add_run(group, (key, pair, seed), row["state"].decode(), found)
    if not found.seen:
        known = ", ".join(known_metrics(store)) or "none"
        raise ResultsError(f"--metric {question.metric}: no run has it; there is: {known}")
    ordered = list(groups.values())
    _label(ordered, question)
    sign = 1 if question.lower else -1

    def rank(group: RunGroup) -> tuple[float, Any]:
        mean = sum(group.numbers()) / len(group.values) if group.values else sign * math.inf
        return sign * mean, _natural(group.label)

    return sorted(ordered, key=rank)


def _add_run(group: RunGroup, run: tuple[str, str, Any], state: str, found: _Values) -> None:
    key, pair, seed = run
    value = found.of(key)
    if state != _FINISHED:
        group.left_out.append((key, seed, state))
    elif isinstance(value, str):
        group.left_out.append((key, seed, value))
    elif twin := next((one.run for one in group.values if one.pair == pair), None):
        # Two runs of one seed are not independent. The newest run comes first.
        group.left_out.append((key, seed, f"has the seed of {twin}, which is newer"))
    else:
        group.values.append(RunValue(key, pair, seed, *value))


class _Values:
    """The metric of each run, or the reason for its absence."""

    def __init__(self, store: ResultsFile, question: Question) -> None:
        self._store, self._question = store, question
        self.seen = False
        table = store.table("summary")
        mine = table[table["metric"] == question.metric.encode()]
        self._rows = dict(zip(mine["run"].tolist(), mine, strict=True))

    def of(self, key: str) -> tuple[float, int, float, int] | str:
        question = self._question
        if question.metric.startswith("result."):
            return self._in_result(key)
        row = self._rows.get(key.encode())
        if row is None:
            return f"has no {question.metric}"
        self.seen = True
        best = (float(row["min"]), int(row["min_step"]))
        if not question.lower:
            best = (float(row["max"]), int(row["max_step"]))
        value, step = float(row["last"]), int(row["last_step"])
        if not math.isfinite(value):
            # A run that has diverged does not count by an earlier value.
            return f"{question.metric} is not finite at step {step}"
        if question.at == "best":
            value, step = best
        elif question.at != "last":
            at = self._at_step(key, int(question.at))
            if isinstance(at, str):
                return at
            value, step = at
        if not math.isfinite(value):
            return f"{question.metric} is not finite at step {step}"
        return (value, step, *best)

    def _at_step(self, key: str, step: int) -> tuple[float, int] | str:
        records = self._store.metrics(key)
        if records is None or "step" not in (records.dtype.names or ()):
            return "has no steps"
        columns: dict[str, NDArray[Any]] = fields(records)
        keep = counted(columns, len(records))
        if keep is not None:
            columns = {name: column[keep] for name, column in columns.items()}
        here = columns["step"] == step
        # The validation has a separate line, so the step also has a row without the metric.
        values = columns[self._question.metric][here]
        if not len(values):
            return f"has no row at step {step}"
        finite = values[np.isfinite(values)]
        return float(finite[-1] if len(finite) else values[-1]), step

    def _in_result(self, key: str) -> tuple[float, int, float, int] | str:
        values = flat(self._store.document(key, "result"))
        value = values.get(self._question.metric.removeprefix("result."))
        if not isinstance(value, int | float) or not math.isfinite(value):
            return f"has no {self._question.metric}"
        self.seen = True
        step = values.get("steps")
        at = step if isinstance(step, int) else NO_STEP
        return float(value), at, float(value), at


def _option(key: str) -> str:
    return f"--{key.rpartition('.')[2]}"


def with_options(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the options of its command, such as ``--lr 0.1``, as keys instead of words."""
    command = config.get("command")
    if not isinstance(command, list):
        return config
    words, others = list(map(str, command)), []
    options: dict[str, Any] = {}
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not re.match(r"--[A-Za-z]", name):
            others.append(f"{name}{equals}{value}")
        elif equals or (words and not words[0].startswith("--")):
            options[name] = _typed(value if equals else words.pop(0))
        else:
            options[name] = True
    return config | {"command": others} | options


def _typed(word: str) -> Any:
    """Return a number if the word is one."""
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return value if isinstance(value, int | float) else word


def seed_keys(values: Mapping[str, Any], key: str) -> set[str]:
    """Return the keys that hold the seed, of the config, of an option, and of a swept placeholder."""
    option = _option(key)
    word = values.get(option)
    found = _PLACEHOLDER.fullmatch(word) if isinstance(word, str) else None
    if found is None:
        return {key, option}
    name = found[1]
    return {key, option, name, *(other for other in values if other.endswith(f".{name}"))}


def _group_keys(values: dict[str, Any], question: Question) -> dict[str, Any]:
    if question.by is not None:
        return {key: _rounded(values.get(key, _ABSENT)) for key in question.by}
    left_out = {"name", *seed_keys(values, question.seed_key)}
    return {
        key: _rounded(value)
        for key, value in values.items()
        if key not in left_out and not key.startswith(SAME_TRAINING)
    }


def _rounded(value: Any) -> Any:
    """Return 0.02 for 0.020000000000000004, a computed value."""
    return float(f"{value:.12g}") if isinstance(value, float) else value


def _label(groups: list[RunGroup], question: Question) -> None:
    """Name each group by the keys in which the groups differ."""
    # A run without a readable config differs from the others in every key.
    known = [group for group in groups if group.known]
    keys = dict.fromkeys(key for group in known for key in group.keys)
    if question.by is None:
        keys = dict.fromkeys(
            key
            for key in keys
            if len({json.dumps(group.keys.get(key, _ABSENT), default=str) for group in known}) > 1
        )
    elif all(value == _ABSENT for group in groups for value in group.keys.values()):
        raise ResultsError(f"--by {','.join(question.by)}: no run has this key in its config")
    for group in groups:
        group.label = "config unknown"
    for group in known:
        group.keys = {key: group.keys.get(key, _ABSENT) for key in keys}
        words = [f"{key}={_shown(value)}" for key, value in group.keys.items()]
        group.label = " ".join(words) or "all runs"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _natural(text: str) -> list[tuple[float, str]]:
    """Return a key that sorts 3e-4 before 0.001 and 9 before 10."""
    parts = re.split(r"((?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)", text)
    return [(float(part), "") if at % 2 else (math.inf, part) for at, part in enumerate(parts)]


def labels(store: ResultsFile) -> dict[str, str]:
    """Return a different name for each run of ``store``, by the run's key.

    A run of a sweep is ``SWEEP/000`` if the sweep folder is still there. Every other name is the key.
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    for row in store.table("runs"):
        key, path = row["run"].decode(), Path(row["path"].decode())
        name = f"{path.parent.name}/{path.name}" if is_sweep(path.parent) else key
        found[key] = f"{name} ({key})" if name in taken else name
        taken.add(name)
    return found
