"""A sweep file: YAML with the blocks ``grid``, ``zip``, ``list`` and ``random``, and conditions."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrun.api.sweeps.axes import range_of
from hpcrun.api.sweeps.rows import Condition, Row, RowBlock, SweepRequest, plain, refusal
from hpcrun.config import file_layer

_PARTS = ("grid", "zip", "list", "random", "where")
_DIGITS = 6
_MOST_DRAWS = 100_000
Place = Callable[[str], str]
"""Returns file and line of a dotted key of the sweep file."""


def read_sweep_file(path: Path) -> SweepRequest:
    """Return the sweep that the YAML or JSON file describes.

    Raises:
        ConfigError: the file cannot be read, or a part of it is wrong; the place names file and line.
    """
    layer = file_layer(path)

    def place(key: str) -> str:
        while key and key not in layer.where:
            key = key.rpartition(".")[0]
        return layer.where.get(key, str(path))

    for part in layer.values:
        if part not in _PARTS:
            raise refusal(place(part), part, f"unknown; a sweep file has {', '.join(_PARTS)}")
    blocks: list[RowBlock] = []
    for part in ("grid", "zip", "list", "random"):
        content = layer.values.get(part)
        if content:
            blocks += _READERS[part](content, part, place)
    if not blocks:
        raise refusal(str(path), "", "has no values; write `grid:` with keys and lists of values")
    return SweepRequest(blocks, _conditions(layer.values.get("where"), place("where")))


def _conditions(content: Any, place: str) -> list[Condition]:
    lines = [content] if isinstance(content, str) else content or []
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise refusal(place, "where", "should be a list of expressions such as train.lr < 1e-3")
    return [Condition(line, place) for line in lines]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested sections as dotted keys; a random draw or a range, which are mappings, stays whole."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and not set(value) & _KINDS:
            found |= flat(value, f"{dotted}.")
        else:
            found[dotted] = value
    return found


def _section(content: Any, part: str, place: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise refusal(place, part, "should be keys with their values, such as seed: [0, 1, 2]")
    return flat(content)


def _listed(key: str, values: Any, place: str) -> list[Any]:
    if isinstance(values, dict) and set(values) == {"range"}:
        parts = values["range"]
        if not isinstance(parts, list) or len(parts) not in (2, 3) or not _whole(parts):
            raise refusal(place, key, "range should be [first, end] or [first, end, step]")
        values = list(range_of(key, str(parts), parts))
    if not isinstance(values, list) or not values:
        raise refusal(place, key, "should be a list of values, or {range: [first, end]}")
    return values


def _whole(parts: Sequence[Any]) -> bool:
    return all(isinstance(part, int) and not isinstance(part, bool) for part in parts)


def _grid(content: Any, part: str, place: Place) -> list[RowBlock]:
    blocks = []
    for key, values in _section(content, part, place(part)).items():
        line = place(f"{part}.{key}")
        blocks.append(RowBlock([{key: plain(value)} for value in _listed(key, values, line)], line))
    return blocks


def _zip(content: Any, part: str, place: Place) -> list[RowBlock]:
    axes = {
        key: _listed(key, values, place(f"{part}.{key}"))
        for key, values in _section(content, part, place(part)).items()
    }
    counts = {key: len(values) for key, values in axes.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{key} has {count}" for key, count in counts.items())
        raise refusal(place(part), part, f"all keys need the same number of values: {told}")
    rows = [
        {key: plain(value) for key, value in zip(axes, values, strict=True)}
        for values in zip(*axes.values(), strict=True)
    ]
    return [RowBlock(rows, place(part))]


def _list(content: Any, part: str, place: Place) -> list[RowBlock]:
    if not isinstance(content, list) or not all(isinstance(row, dict) and row for row in content):
        raise refusal(
            place(part), part, "should be a list of runs such as {train.lr: 1e-4, seed: 0}"
        )
    rows: list[Row] = [{key: plain(value) for key, value in flat(row).items()} for row in content]
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            missing = ", ".join(sorted(row.keys() ^ rows[0].keys()))
            told = f"run {number + 1} and run 1 differ in their keys: {missing}"
            raise refusal(place(f"{part}.{number}"), part, told)
    return [RowBlock(rows, place(part))]


def _random(content: Any, part: str, place: Place) -> list[RowBlock]:
    axes = _section(content, part, place(part))
    seed, count = axes.pop("seed", None), axes.pop("count", None)
    if not _whole([seed, count]) or not 1 <= count <= _MOST_DRAWS:
        raise refusal(place(part), part, "needs whole numbers `seed:` and `count:`")
    draws = {key: _draw(key, one, place(f"{part}.{key}")) for key, one in axes.items()}
    if not draws:
        raise refusal(
            place(part), part, "has no keys; write one such as lr: {log_uniform: [1e-5, 1]}"
        )
    source = random.Random(seed)
    # Draw row by row, so that a larger count only adds rows.
    return [
        RowBlock(
            [{key: plain(draw(source)) for key, draw in draws.items()} for _ in range(count)],
            place(part),
        )
    ]


Draw = Callable[[random.Random], Any]


def _draw(key: str, content: Any, place: str) -> Draw:
    if not isinstance(content, dict) or len(content) != 1 or not set(content) <= _DRAWS:
        names = ", ".join(sorted(_DRAWS))
        raise refusal(place, key, f"should be one of {names}, such as {{uniform: [0, 1]}}")
    ((kind, values),) = content.items()
    if not isinstance(values, list) or not values:
        raise refusal(place, key, f"{kind} needs a list")
    if kind == "choice":
        return lambda source: source.choice(values)
    if len(values) != 2 or not _in_order(values):
        raise refusal(place, key, f"{kind} needs [low, high] with low < high")
    low, high = values
    if kind == "integer":
        if not _whole(values):
            raise refusal(place, key, "integer needs whole numbers; both ends are possible")
        return lambda source: source.randint(low, high)
    if kind == "uniform":
        return lambda source: _rounded(source.uniform(low, high))
    if low <= 0:
        raise refusal(place, key, "log_uniform needs numbers above 0")
    return lambda source: _rounded(math.exp(source.uniform(math.log(low), math.log(high))))


def _in_order(values: Sequence[Any]) -> bool:
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)
    return numbers and all(map(math.isfinite, values)) and values[0] < values[1]


def _rounded(number: float) -> float:
    """Return the number with the digits that a person reads in a table."""
    return float(f"{number:.{_DIGITS}g}")


_DRAWS = {"choice", "uniform", "log_uniform", "integer"}
_KINDS = _DRAWS | {"range"}
_READERS: dict[str, Callable[[Any, str, Place], list[RowBlock]]] = {
    "grid": _grid,
    "zip": _zip,
    "list": _list,
    "random": _random,
}
