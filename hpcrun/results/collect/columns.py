"""Typed columns from JSON lines, the rows that count, and the summary of each metric."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from types import NoneType
from typing import Any, BinaryIO

import numpy as np
import orjson
from numpy.typing import NDArray

from hpcrun.results.collect.column_types import Misfit, Part, settled
from hpcrun.run.files import intact_lines, parse_line

NO_STEP = -1
_STEPS = 2.0**63
"""Steps in a table are below this number."""
# Bytes to read at a time: the parsed objects of a block take five times its size.
_BLOCK = 8 << 20
# Each column is a dataset with a head of half a kilobyte.
MOST_COLUMNS = 600
_LONGEST_TEXT = 1000
# Bytes of a text in a table.
_WIDEST = 2000
_NO_METRICS = ("step", "time", "restart", "in_place")


@dataclass
class ParsedLines:
    """The content of a file of JSON lines.

    Args:
        present: the rows with a value, of each column that has gaps.
        torn: bytes of a last line that its writer has not finished.
        cut: what the columns do not hold.
        misfits: values that do not fit their column.
    """

    columns: dict[str, Any] = field(default_factory=dict)
    present: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    rows: int = 0
    damaged: int = 0
    torn: int = 0
    cut: list[str] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)


def parse_rows(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of whole lines, and the number of damaged lines."""
    lines = data.rstrip(b"\n").split(b"\n")
    intact = intact_lines(lines)
    damaged = len(lines) - len(intact)
    with suppress(orjson.JSONDecodeError):
        # A call for each line takes a third more time.
        rows = orjson.loads(b"[" + b",".join(intact) + b"]")
        if len(rows) == len(intact) and set(map(type, rows)) <= {dict}:
            return rows, damaged
    # orjson refuses NaN, and escapes of bytes that are not UTF-8.
    found = [parse_line(line) for line in intact if line.strip()]
    rows = [row for row in found if row is not None]
    return rows, damaged + len(found) - len(rows)


def parse_lines(data: bytes) -> tuple[list[dict[str, Any]], int, int]:
    """Return the objects, the number of damaged lines, and the bytes of an unfinished last line."""
    end = data.rfind(b"\n") + 1
    rows, damaged = parse_rows(data[:end])
    # A complete object ends in a brace; the file may lack the last line break.
    last, torn = parse_rows(data[end:])
    return rows + last, damaged, len(data) - end if torn else 0


def read_lines(stream: BinaryIO, *, block_size: int = _BLOCK) -> ParsedLines:
    """Return all whole lines of ``stream`` as columns, in bounded memory; raises OSError.

    Args:
        block_size: bytes to read at a time.
    """
    columns, damaged, torn = _Columns(), 0, 0
    while not torn and (block := stream.read(block_size) + stream.readline()):
        rows, more, torn = parse_lines(block)
        columns.add(rows)
        damaged += more
    found = columns.joined()
    found.damaged, found.torn = damaged, torn
    return found


def columns_of(rows: Sequence[dict[str, Any]], *, typed: bool = True) -> ParsedLines:
    """Return ``rows`` as columns.

    Args:
        rows: the values of each row by their column.
        typed: the file marks texts, as JSON does and CSV does not.
    """
    columns = _Columns(typed=typed)
    columns.add(rows)
    return columns.joined()


def joined_lines(parts: Iterable[ParsedLines]) -> ParsedLines:
    """Return the rows of all parts, one part after the other; their columns may be arrays or lists."""
    columns = _Columns(typed=False)
    for part in parts:
        columns.append(part)
    return columns.joined()


def selected(lines: ParsedLines, rows: NDArray[Any], *, without: Iterable[str] = ()) -> ParsedLines:
    """Return the rows with these numbers, in their order, without some columns."""
    names = [name for name in lines.columns if name not in without]
    return ParsedLines(
        {name: lines.columns[name][rows] for name in names},
        {name: lines.present[name][rows] for name in names if name in lines.present},
        rows=len(rows),
        cut=lines.cut,
    )


class _Columns:
    """Collects the columns of a file from blocks of rows."""

    def __init__(self, *, typed: bool = True) -> None:
        self._typed = typed
        # For each column the numbers of some rows, and their values.
        self._parts: dict[str, list[Part]] = {}
        self._rows = 0
        self._cut: set[str] = set()

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        self._add(rows, np.arange(self._rows, self._rows + len(rows)))
        self._rows += len(rows)

    def append(self, lines: ParsedLines) -> None:
        """Add whole columns."""
        every = np.arange(self._rows, self._rows + lines.rows)
        for name, values in lines.columns.items():
            here = lines.present.get(name, slice(None))
            kinds = set(map(type, values if isinstance(values, list) else ()))
            self._note(name, every[here], values[here], kinds)
        self._rows += lines.rows

    def _add(
        self, rows: Sequence[dict[str, Any]], at: NDArray[np.int64], *, nested: bool = True
    ) -> None:
        """Add ``rows`` with the numbers ``at`` in the file; the rows with equal keys together.

        A log has few sets of keys, such as those of training and of validation.
        """
        sets: dict[tuple[str, ...], Any] = {}
        every = list(map(tuple, rows))
        if rows and every.count(every[0]) == len(rows):
            sets[every[0]] = slice(None)
        else:
            for number, keys in enumerate(every):
                sets.setdefault(keys, []).append(number)
        for keys, numbers in sets.items():
            same = rows if len(sets) == 1 else [rows[number] for number in numbers]
            cells = list(chain.from_iterable(map(dict.values, same)))
            columns = [cells[number :: len(keys)] for number in range(len(keys))]
            # The first value of most columns tells the type of all, without a look at each.
            floats = [_floats(column) for column in columns]
            kinds: list[set[type]] = [
                {float} if one is not None else set(map(type, column))
                for one, column in zip(floats, columns, strict=True)
            ]
            if nested and any(dict in found for found in kinds):
                self._add([flat(row) for row in same], at[numbers], nested=False)
                continue
            for key, one, values, found in zip(keys, floats, columns, kinds, strict=True):
                self._note(key, at[numbers], values if one is None else one, found)

    def _note(self, key: str, at: NDArray[np.int64], values: Any, kinds: set[type]) -> None:
        key = key or "_"  # numpy gives a field without a name another one
        if key not in self._parts and len(self._parts) == MOST_COLUMNS:
            self._cut.add(f"columns beyond {MOST_COLUMNS} are dropped")
            return
        found = _numbers(values, kinds)
        if found is None and kinds & {int, float} and kinds & {str, bool}:
            # Numbers stay numbers among other values.
            for chosen in (True, False):
                some = [
                    number
                    for number, one in enumerate(values)
                    if one is not None and (type(one) in (int, float)) is chosen
                ]
                these = [values[number] for number in some]
                self._note(key, at[some], these, set(map(type, these)))
            return
        if found is None:
            found, cut = _texts(values)
            if cut:
                self._cut.add(f"texts of {key} are cut to {_LONGEST_TEXT} bytes")
            if list in kinds:
                self._cut.add(f"lists of {key} are kept as JSON texts")
        self._parts.setdefault(key, []).append((at, found))

    def joined(self) -> ParsedLines:
        """Return the columns, each joined from its blocks."""
        lines = ParsedLines(rows=self._rows, cut=sorted(self._cut))
        for key, found in self._parts.items():
            parts = found
            if any(values.dtype.kind in "Sb" for _, values in found):
                parts, misfits = settled(key, found, typed=self._typed)
                lines.misfits += misfits
            at = np.concatenate([numbers for numbers, _ in parts])
            lines.columns[key] = _joined([values for _, values in parts], at, self._rows)
            if len(at) < self._rows:
                lines.present[key] = np.isin(np.arange(self._rows), at)
        return lines


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values as one level of keys with dots, as in ``train.lr``."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _floats(values: Sequence[Any]) -> NDArray[np.float64] | None:
    """Return an array, if the first value is a float and the others are numbers; else None."""
    if type(values[0]) is float:
        with suppress(TypeError, OverflowError):
            # A fifth of the time of numpy.
            found = np.frombuffer(array("d", values))
            # A boolean becomes 0 or 1 here.
            flags = found == 0
            flags |= found == 1
            return None if flags.any() and bool in set(map(type, values)) else found
    return None


def _numbers(values: Any, kinds: set[type]) -> NDArray[Any] | None:
    """Return an array of numbers, or None if ``values`` contains anything else."""
    if isinstance(values, np.ndarray):
        return values
    if kinds == {bool}:
        return np.array(values, bool)
    if kinds == {int}:
        with suppress(OverflowError):
            return np.array(values, np.int64)
    # null, which marks a value that is not finite, becomes NaN.
    if kinds <= {int, float, NoneType} or kinds <= {bool, NoneType}:
        with suppress(OverflowError):
            return np.array(values, np.float64)
    return None


def _texts(values: Iterable[Any]) -> tuple[NDArray[Any], bool]:
    """Return UTF-8 texts, and whether one was cut; other values become JSON."""
    whole = list(map(_text, values))
    # Do not cut within a character.
    found = [text[:_LONGEST_TEXT].decode(errors="ignore").encode() for text in whole]
    # Few widths, so that most runs share their type.
    width = -(-max(*map(len, found), 1) // 8) * 8
    return np.array(found, f"S{width}"), max(map(len, whole)) > _LONGEST_TEXT


def _text(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace")
    # A gap among numbers is NaN.
    if value is None or value != value:
        return b""
    try:
        return orjson.dumps(value)
    except TypeError:
        # A whole number beyond 64 bits, or half of a surrogate pair.
        return repr(value).encode(errors="backslashreplace")


def _joined(parts: Sequence[NDArray[Any]], at: NDArray[np.int64], rows: int) -> NDArray[Any]:
    """Return one array of length ``rows`` from the parts, with the values of the rows ``at``."""
    kinds = {part.dtype.kind for part in parts}
    if "S" in kinds:
        parts = [part if part.dtype.kind == "S" else _texts(part.tolist())[0] for part in parts]
        found = np.zeros(rows, max(part.dtype for part in parts))
    elif len(kinds) == 1 and len(at) == rows:
        found = np.empty(rows, np.result_type(*parts))
    else:
        found = np.full(rows, np.nan)
    found[at] = np.concatenate(parts)
    return found


def counted(columns: Mapping[str, NDArray[Any]], rows: int) -> NDArray[np.bool_] | None:
    """Return the rows that count, or None if all rows count.

    A restart repeats steps that the previous attempt lost. For a repeated step, only the rows of the later
    attempt count.
    """
    steps = columns.get("step")
    if steps is None or rows < 2 or steps.dtype.kind not in "iuf":
        return None
    before, after = steps[:-1], steps[1:]
    back = after < before
    for name in ("restart", "in_place"):
        number = columns.get(name)
        if number is not None and number.dtype.kind in "iuf":
            known = _without_gaps(number)
            back |= (after == before) & (known[1:] != known[:-1])
    rewinds = np.flatnonzero(back)
    if not len(rewinds):
        return None
    keep = np.ones(rows, bool)
    for at in rewinds + 1:
        keep[:at] &= steps[:at] < steps[at]
    return keep


def _without_gaps(restart: NDArray[Any]) -> NDArray[Any]:
    """Return the restart of each row; a line without a restart has that of the previous line."""
    rows = np.where(np.isfinite(restart), np.arange(len(restart)), 0)
    filled: NDArray[Any] = np.nan_to_num(restart[np.maximum.accumulate(rows)])
    return filled


def step_at_end(lines: ParsedLines) -> int | None:
    """Return the step of the last row, or None if it has none."""
    steps = lines.columns.get("step")
    if steps is None or steps.dtype.kind not in "iuf" or not np.abs(steps[-1]) < _STEPS:
        return None
    return int(steps[-1])


def summary_of(lines: ParsedLines) -> list[tuple[Any, ...]]:
    """Return a row of the table ``summary`` for each metric, without the run."""
    keep = counted(lines.columns, lines.rows)
    steps = _steps(lines)
    found = []
    for name, column in lines.columns.items():
        if name in _NO_METRICS or column.dtype.kind not in "iufb":
            continue
        mask = np.ones(lines.rows, bool) if keep is None else keep
        mask = mask & lines.present.get(name, True)
        values, at = column[mask].astype(np.float64), steps[mask]
        if len(values):
            found.append((name, *_summary(values, at)))
    return found


def _summary(values: NDArray[np.float64], at: NDArray[Any]) -> tuple[Any, ...]:
    """Return the cells from ``rows`` to ``max_step``."""
    finite = np.isfinite(values)
    ends: list[Any] = [np.nan, NO_STEP] * 2
    if finite.any():
        low = np.where(finite, values, np.inf).argmin()
        high = np.where(finite, values, -np.inf).argmax()
        ends = [values[low], at[low], values[high], at[high]]
    return (len(values), int((~finite).sum()), values[-1], at[-1], *ends)


def _steps(lines: ParsedLines) -> NDArray[Any]:
    """Return the step of each row, or the number of the row if it has none."""
    steps: NDArray[Any] | None = lines.columns.get("step")
    if steps is None or steps.dtype.kind not in "iuf":
        return np.arange(lines.rows)
    if steps.dtype.kind == "f":
        return np.where(np.abs(steps) < _STEPS, steps, NO_STEP).astype(np.int64)
    return steps


def structured(columns: Mapping[str, NDArray[Any]], rows: int) -> NDArray[Any]:
    """Return ``columns`` as one array of records."""
    whole = np.empty(rows, np.dtype([(name, column.dtype) for name, column in columns.items()]))
    for name, column in columns.items():
        whole[name] = column
    return whole


def fields(records: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the columns of records by name."""
    return {name: records[name] for name in records.dtype.names or ()}


def texts(values: Iterable[str | None]) -> NDArray[Any]:
    """Return UTF-8 texts of one width, cut if they are long; other bytes are escaped, None is empty."""
    whole = [(value or "").encode(errors="backslashreplace") for value in values]
    raw = [text[:_WIDEST].decode(errors="ignore").encode() for text in whole]
    return np.array(raw, f"S{max(map(len, raw), default=1) or 1}")
