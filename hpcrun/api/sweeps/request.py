"""The requested sweep: axes of ``--sweep``, blocks of a sweep file, or a dict of Python; and its rows."""

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.api.submission.choose_config import require_key
from hpcrun.api.sweeps.search import Search, read_search
from hpcrun.config import ConfigError, Problem, file_layer, override_layer
from hpcrun.config.schema import kind_at
from hpcrun.errors import UserError

OPTION = "--sweep"
_PYTHON = "sweep="
# More elements than any cluster takes as one sweep.
_MAX = 100_000


@dataclass(frozen=True)
class SweepValue:
    """One value of a key: as the config has it, and as the user wrote it (for a command)."""

    value: object
    text: str


Row = Mapping[str, SweepValue]
"""The values of one element by dotted key."""


@dataclass(frozen=True)
class RowBlock:
    """Rows with the same keys; ``place``: the option, or the line of the file, that contains them."""

    rows: Sequence[Row]
    place: str


@dataclass(frozen=True)
class SweepRequest:
    """The requested sweep: the product of ``blocks``, or the runs that ``search`` chooses."""

    blocks: Sequence[RowBlock] = ()
    search: Search | None = None

    def place_of(self, key: str) -> str:
        """Return the option or file line with the values of ``key``."""
        return next((block.place for block in self.blocks if key in block.rows[0]), OPTION)


def text_of(value: object) -> str:
    """Return ``value`` as a word for a command: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def canonical(values: Mapping[str, object]) -> str:
    """Return a text that is equal for equal values: 1 equals 1.0, and the order of keys does not matter."""

    def number(value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
            return float(value)
        return value

    return json.dumps({key: number(value) for key, value in values.items()}, sort_keys=True)


def refusal(place: str, key: str, text: str) -> ConfigError:
    """Return the error with one line: place, key and problem."""
    return ConfigError([Problem(place, key, text)])


def row_of(values: Mapping[str, object]) -> Row:
    """Return the row with ``values``, which no person has written as text."""
    return {key: SweepValue(value, text_of(value)) for key, value in values.items()}


def expand(request: SweepRequest) -> list[Row]:
    """Return the rows of all elements; the keys of the last block change fastest.

    Raises:
        ConfigError: a key is in two blocks, or two rows are equal.
    """
    places: dict[str, str] = {}
    for block in request.blocks:
        for key in block.rows[0]:
            if key in places:
                words = f"{places[key]} has this key too; keep one of the two"
                raise refusal(block.place, key, words)
            places[key] = block.place
    count = math.prod(len(block.rows) for block in request.blocks)
    if count > _MAX:
        raise refusal(OPTION, "", f"{count} runs are more than {_MAX}; use fewer values")
    rows: list[Row] = [
        {key: value for row in parts for key, value in row.items()}
        for parts in itertools.product(*(block.rows for block in request.blocks))
    ]
    seen: set[str] = set()
    for row in rows:
        mark = canonical({key: given.value for key, given in row.items()})
        if mark in seen:
            reported = " ".join(f"{key}={text_of(given.value)}" for key, given in row.items())
            raise refusal(
                places[next(iter(row))], reported, "is given twice; remove one of the two"
            )
        seen.add(mark)
    return rows


def read_axes(options: Sequence[str]) -> list[RowBlock]:
    """Return a block for each ``KEY=VALUES``.

    ``VALUES`` are values separated by commas, or ranges of whole numbers ``first:end`` or ``first:end:step``;
    the end is excluded.

    Raises:
        ConfigError: an option is not KEY=VALUES, or a key is given twice.
    """
    blocks: dict[str, RowBlock] = {}
    for option in options:
        key, equals, text = option.partition("=")
        key = key.strip()
        if not equals or not key:
            raise refusal(OPTION, option, "write an axis as KEY=VALUES, such as train.lr=1e-4,3e-4")
        if not text.strip():
            raise refusal(OPTION, key, "has no values; write them with commas: 1e-4,3e-4")
        if key in blocks:
            raise refusal(OPTION, key, "is given twice; write all its values in one --sweep")
        rows: list[Row] = [{key: value} for word in _split(text) for value in _values(key, word)]
        if not rows:
            words = f"{text} is an empty range; the end is excluded: 0:3 means 0, 1, 2"
            raise refusal(OPTION, key, words)
        blocks[key] = RowBlock(rows, OPTION)
    return [*blocks.values()]


def _split(text: str) -> Iterator[str]:
    """Split at the commas outside brackets and quotes."""
    depth, quote, word = 0, "", ""
    for letter in text:
        if letter == "," and not depth and not quote:
            yield word
            word = ""
            continue
        word += letter
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        else:
            depth += (letter in "[{(") - (letter in "]})")
    yield word


_RANGE = re.compile(r"(-?\d+):(-?\d+)(?::(-?\d+))?")


def _values(key: str, word: str) -> Iterator[SweepValue]:
    span = _RANGE.fullmatch(word.strip())
    if span is not None and kind_at(key.split(".")) != "text":
        numbers = _range(key, word, [int(part) for part in span.groups() if part])
        yield from (SweepValue(number, str(number)) for number in numbers)
        return
    value: Any = override_layer([f"{key}={word}"], OPTION).values
    for part in key.split("."):
        value = value[part.strip()]
    yield SweepValue(value, word)


def _range(key: str, shown: str, parts: Sequence[int]) -> range:
    if len(parts) == 3 and parts[2] == 0:
        raise refusal(OPTION, key, f"{shown} has step 0; use another step")
    numbers = range(*parts)
    if len(numbers) > _MAX:
        raise refusal(OPTION, key, f"{shown} has more than {_MAX} numbers; use a shorter range")
    return numbers


def sweep_request(
    axes: Mapping[str, Iterable[object]] | None, file: str | os.PathLike[str] | None
) -> SweepRequest:
    """Return the product of the sweep in ``file`` and of ``axes``: values by dotted key.

    Raises:
        UserError: an axis has no values, or the file is wrong.
    """
    request = read_sweep_file(Path(file)) if file is not None else SweepRequest()
    if axes is not None and not isinstance(axes, Mapping):
        raise UserError(f"{_PYTHON}: give a dict, such as {_PYTHON}{{'seed': range(3)}}")
    blocks = [*request.blocks]
    for key, values in (axes or {}).items():
        require_key(key, _PYTHON)
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise UserError(f"{_PYTHON}: {key}: give a list of values, such as [1e-4, 3e-4]")
        found = [_plain(key, value) for value in values]
        if not found:
            raise UserError(f"{_PYTHON}: {key}: has no values; give at least one")
        blocks.append(RowBlock([row_of({key: value}) for value in found], _PYTHON))
    if request.search is not None and blocks:
        raise UserError(
            f"{_PYTHON}: has no effect with the search in {file}; remove one of the two"
        )
    if not blocks and request.search is None:
        raise UserError(
            f"{_PYTHON}: has no key; give values, such as {_PYTHON}{{'seed': range(3)}}"
        )
    return SweepRequest(blocks, request.search)


def _plain(key: str, value: object) -> object:
    """Return a value of Python, pathlib or numpy as the config has it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    known = value.item() if hasattr(value, "item") else value
    if isinstance(known, list | tuple):
        return [_plain(key, part) for part in known]
    if known is None or isinstance(known, str | int | float | bool):
        return known
    raise UserError(
        f"{_PYTHON}: {key}: {value!r} is not a value of a config; give text or a number"
    )


_SEARCH = "search"

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
        if part not in (*_READERS, _SEARCH):
            known = ", ".join((*_READERS, _SEARCH))
            raise refusal(place(part), part, f"unknown; a sweep file has {known}")
        if _SEARCH in layer.values and part != _SEARCH:
            raise refusal(place(part), part, "has no effect with search; remove one of the two")
    if _SEARCH in layer.values:
        return SweepRequest(search=read_search(layer.values[_SEARCH], place))
    blocks = [
        block
        for part, reader in _READERS.items()
        if layer.values.get(part)
        for block in reader(layer.values[part], part, place)
    ]
    if not blocks:
        raise refusal(str(path), "", "has no values; write `grid:` with keys and lists of values")
    return SweepRequest(blocks)


def _grid(content: object, part: str, place: Place) -> list[RowBlock]:
    if not isinstance(content, dict):
        words = "should be keys with their values, such as seed: [0, 1, 2]"
        raise refusal(place(part), part, words)
    blocks = []
    for key, values in content.items():
        where = place(f"{part}.{key}")
        if not isinstance(values, list) or not values:
            raise refusal(where, key, "should be a list of values; write sections as in train.lr")
        blocks.append(RowBlock([row_of({key: value}) for value in values], where))
    return blocks


def _list(content: object, part: str, place: Place) -> list[RowBlock]:
    if not isinstance(content, list) or not all(isinstance(row, dict) and row for row in content):
        words = "should be a list of runs such as {train.lr: 1e-4, seed: 0}"
        raise refusal(place(part), part, words)
    for number, row in enumerate(content):
        if row.keys() != content[0].keys():
            missing = ", ".join(sorted(row.keys() ^ content[0].keys()))
            reported = f"run {number + 1} and run 1 differ in their keys: {missing}"
            raise refusal(place(f"{part}.{number}"), part, reported)
    return [RowBlock([row_of(row) for row in content], place(part))]


_READERS: dict[str, Callable[[object, str, Place], list[RowBlock]]] = {"grid": _grid, "list": _list}
