"""Typed columns from JSON lines."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, BinaryIO

import numpy as np
import orjson
from numpy.typing import NDArray

from hpcrun.run.files import intact_lines, parse_line

# Bytes to read at a time: the parsed objects of a block take five times its size.
_BLOCK = 8 << 20
_MOST_COLUMNS = 600
# HDF5 describes all columns in one message of 64 KiB: for each column the name, and up to 36 bytes for
# the type (measured with libver v108).
_MOST_HEADER = 56 << 10
_HEADER_OF_COLUMN = 48
_LONGEST_TEXT = 1000
_MISSING = object()
# Sets of keys in a block: with more different rows, the rows are read one by one.
_MOST_SETS = 16
_INT64 = np.dtype(np.int64)
_Part = tuple[NDArray[np.int64], NDArray[Any], "NDArray[np.bool_] | None"]
"""The rows of some values of a column, the values, and the rows among them that have one."""


@dataclass
class ParsedLines:
    """The content of a file of JSON lines.

    Args:
        torn: bytes of a last line that its writer has not finished.
    """

    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    present: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    rows: int = 0
    damaged: int = 0
    torn: int = 0
    cut: list[str] = field(default_factory=list)


def parse_rows(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of whole lines, and the number of damaged lines."""
    lines = data.rstrip(b"\n").split(b"\n")
    intact = intact_lines(lines)
    damaged = len(lines) - len(intact)
    try:
        # A call for each line takes a third more time.
        rows = orjson.loads(b"[" + b",".join(intact) + b"]")
        if len(rows) == len(intact) and set(map(type, rows)) <= {dict}:
            return rows, damaged
    except orjson.JSONDecodeError:
        pass
    found = []
    for line in intact:
        if not line.strip():
            continue
        row = _parse(line)
        if row is None:
            damaged += 1
        else:
            found.append(row)
    return found, damaged


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        # NaN, and escapes of bytes that are not UTF-8.
        return parse_line(line)
    return value if isinstance(value, dict) else None


def read_lines(stream: BinaryIO, size: int = _BLOCK, *, block_size: int = _BLOCK) -> ParsedLines:
    """Return all whole lines of ``stream`` as columns, in bounded memory; raises OSError.

    Args:
        size: bytes to expect; a file may be longer.
        block_size: bytes to read at a time.
    """
    blocks = _Blocks()
    rest = b""
    # The allocation of a block larger than the file would take time.
    while block := stream.read(min(max(size, 1), block_size)):
        end = block.rfind(b"\n") + 1
        if not end:
            rest += block
            continue
        rows, damaged = parse_rows(rest + block[:end] if rest or end < len(block) else block)
        rest = block[end:]
        blocks.damaged += damaged
        blocks.add(rows)
    if rest:
        # A complete object ends in a brace; the file may lack the last line break.
        rows, torn = parse_rows(rest)
        blocks.torn = len(rest) if torn else 0
        blocks.add(rows)
    return blocks.joined()


def columns_of(rows: Sequence[dict[str, Any]], *, most_sets: int = _MOST_SETS) -> ParsedLines:
    """Return ``rows`` as columns; ``most_sets``: with more sets of keys, the rows are read one by one."""
    blocks = _Blocks(most_sets)
    blocks.add(rows)
    return blocks.joined()


class _Blocks:
    """Collects the columns of a file from blocks of lines."""

    def __init__(self, most_sets: int = _MOST_SETS) -> None:
        self._most_sets = most_sets
        self._parts: dict[str, list[_Part]] = {}
        self._rows = self.damaged = self.torn = 0
        self._header = 0
        self._full = False
        self._cut: set[str] = set()

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append ``rows``."""
        if rows:
            self._add(rows, np.arange(self._rows, self._rows + len(rows)))
            self._rows += len(rows)

    def _add(self, rows: Sequence[dict[str, Any]], at: NDArray[np.int64]) -> None:
        """Add the values of ``rows``, whose numbers in the file are ``at``.

        A log has few sets of keys, such as those of training and of validation. The rows of a set are read
        together.
        """
        keys_of_rows = list(map(tuple, rows))
        if keys_of_rows.count(keys_of_rows[0]) == len(rows):
            keys, columns = _transposed(rows)
        else:
            sets: dict[tuple[str, ...], list[int]] = {}
            for number, found in enumerate(keys_of_rows):
                sets.setdefault(found, []).append(number)
            if len(sets) <= self._most_sets:
                for numbers in sets.values():
                    self._add([rows[number] for number in numbers], at[numbers])
                return
            keys, columns = _with_gaps(rows)
        self._note(rows, at, keys, columns)

    def _note(
        self,
        rows: Sequence[dict[str, Any]],
        at: NDArray[np.int64],
        keys: Sequence[str],
        columns: Sequence[Sequence[Any]],
    ) -> None:
        numbers = [_alike(column) for column in columns]
        kinds = [
            set(map(type, column)) if found is None else set[type]()
            for column, found in zip(columns, numbers, strict=True)
        ]
        if any(dict in found for found in kinds):
            self._add([_flat(row) for row in rows], at)
            return
        for key, values, part, found in zip(keys, columns, numbers, kinds, strict=True):
            if key not in self._parts and not self._has_room(key):
                continue
            typed = self._typed(key, values, found) if part is None else (part, None)
            self._parts.setdefault(key, []).append((at, *typed))

    def _has_room(self, key: str) -> bool:
        """Count a new column; return False if the file cannot hold another column."""
        header = self._header + len(key.encode(errors="backslashreplace")) + _HEADER_OF_COLUMN
        # After a dropped column, drop all others too: the run keeps its first columns.
        if self._full or len(self._parts) >= _MOST_COLUMNS or header > _MOST_HEADER:
            self._full = True
            self._cut.add(f"columns beyond {len(self._parts)} are dropped")
            return False
        self._header = header
        return True

    def _typed(
        self, key: str, values: Sequence[Any], kinds: set[type]
    ) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        present = None
        if object in kinds:
            present = np.fromiter((value is not _MISSING for value in values), bool, len(values))
            kinds.discard(object)
            # An empty text marks a missing text.
            absent = "" if kinds == {str} else None
            values = [absent if value is _MISSING else value for value in values]
            kinds |= {type(absent)}
        typed = _numbers(values, kinds)
        if typed is None:
            typed, cut = _texts(values)
            if cut:
                self._cut.add(f"texts of {key} are cut to {_LONGEST_TEXT} bytes")
        return typed, present

    def joined(self) -> ParsedLines:
        """Return the columns, each joined from its blocks."""
        lines = ParsedLines(
            rows=self._rows, damaged=self.damaged, torn=self.torn, cut=sorted(self._cut)
        )
        for key, parts in self._parts.items():
            if len(parts) == 1 and len(parts[0][1]) == self._rows:
                lines.columns[key] = parts[0][1]
                if parts[0][2] is not None:
                    lines.present[key] = parts[0][2]
            else:
                lines.columns[key], present = _joined(parts, self._rows)
                if not present.all():
                    lines.present[key] = present
        return lines


def _transposed(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[Sequence[Any]]]:
    """Return the keys and columns of rows with equal keys in equal order."""
    keys = list(rows[0])
    values = list(chain.from_iterable(map(dict.values, rows)))
    return keys, [values[at :: len(keys)] for at in range(len(keys))]


def _with_gaps(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[Sequence[Any]]]:
    """Return the keys and columns of any rows."""
    keys = list(dict.fromkeys(chain.from_iterable(rows)))
    return keys, [[row.get(key, _MISSING) for row in rows] for key in keys]


def _alike(values: Sequence[Any]) -> NDArray[Any] | None:
    """Return an array of numbers, or None if the type of each value must be checked."""
    kind = type(values[0])
    try:
        if kind is float:
            # Whole numbers and booleans among floats become floats.
            return np.frombuffer(array("d", values))
        if kind is int:
            found = np.frombuffer(array("q", values), _INT64)
            # numpy converts true to 1.
            if not (found >> 1 == 0).any() or set(map(type, values)) == {int}:
                return found
    except (TypeError, OverflowError):
        pass
    return None


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested objects as keys with dots."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _numbers(values: Sequence[Any], kinds: set[type]) -> NDArray[Any] | None:
    """Return an array of numbers, or None if ``values`` contains anything else."""
    if kinds == {bool}:
        return np.array(values, bool)
    if kinds <= {int, float, bool, type(None)}:
        return _floats(values)
    return None


def _floats(values: Iterable[Any]) -> NDArray[Any]:
    """Return floats; null, which marks a non-finite value, becomes NaN."""
    known = [np.nan if value is None else value for value in values]
    try:
        return np.frombuffer(array("d", known))
    except OverflowError:
        return np.array([_float(value) for value in known], np.float64)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _texts(values: Iterable[Any]) -> tuple[NDArray[Any], bool]:
    """Return UTF-8 texts, and whether one was cut; other values become JSON."""
    texts = [_text(value) for value in values]
    longest = max(map(len, texts), default=1)
    if longest > _LONGEST_TEXT:
        # Do not cut within a character.
        texts = [
            text[:_LONGEST_TEXT].decode(errors="ignore").encode()
            if len(text) > _LONGEST_TEXT
            else text
            for text in texts
        ]
    # Few widths, so that most runs share their type.
    width = -(-max(min(longest, _LONGEST_TEXT), 1) // 8) * 8
    return np.array(texts, f"S{width}"), longest > _LONGEST_TEXT


def _text(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace")
    if value is None:
        return b""
    try:
        return orjson.dumps(value)
    except (TypeError, ValueError):
        return repr(value).encode(errors="backslashreplace")


def _joined(parts: Sequence[_Part], rows: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return one array of length ``rows`` from the parts, and a mask of the rows with a value."""
    kinds = {part.dtype.kind for _, part, _ in parts}
    whole = sum(len(part) for _, part, _ in parts) == rows
    present = np.zeros(rows, bool)
    joined: NDArray[Any]
    if "S" in kinds:
        if kinds != {"S"}:
            parts = [
                (
                    at,
                    part if part.dtype.kind == "S" else _texts(map(_or_none, part.tolist()))[0],
                    here,
                )
                for at, part, here in parts
            ]
        joined = np.zeros(rows, max(part.dtype for _, part, _ in parts))
    elif len(kinds) == 1 and whole:
        joined = np.zeros(rows, parts[0][1].dtype)
    else:
        joined = np.full(rows, np.nan)
    for at, part, here in parts:
        joined[at] = part
        present[at] = True if here is None else here
    return joined, present


def _or_none(value: Any) -> Any:
    return None if value != value else value
