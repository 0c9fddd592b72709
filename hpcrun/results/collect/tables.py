"""Tables of text, such as CSV files, as columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrun.results.collect.column_types import misfit_problems
from hpcrun.results.collect.columns import ParsedLines, columns_of
from hpcrun.results.collect.run_reader import line_problems
from hpcrun.run.files import read_at_most

LARGEST = 1 << 30
"""Bytes of a file of metrics: a device or a log has no end."""
_DELIMITERS = ",\t;|"
_NAMED_LINES = 5
_MARK = "\ufeff"


@dataclass
class FileContent:
    """The content of a file, and what its columns do not hold.

    Args:
        described: unit, meaning and place in the file, of each column of an HDF5 or NPZ file.
        restarts: for each row, the number of headers that a program has written again before the row.
    """

    lines: ParsedLines = field(default_factory=ParsedLines)
    problems: list[str] = field(default_factory=list)
    described: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    restarts: NDArray[np.int64] | None = None


def read_csv(path: Path) -> FileContent:
    """Return the columns of a file with a header and a delimiter.

    A program that appends to its file writes the header again: there a restart begins. Lines with another
    number of cells, and those below another header, are damaged.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has no header, or is not UTF-8.
    """
    raw = read_at_most(path, LARGEST)
    # The writer may be in the middle of a number.
    end = raw.rfind(b"\n") + 1
    text = raw[:end].decode("utf-8-sig")
    torn = len(raw) - end if raw[end:].strip() else 0
    delimiter = _delimiter(text.partition("\n")[0], "\t" if path.suffix == ".tsv" else ",")
    head, *table = [*csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)] or [[]]
    if not any(head):
        return FileContent(problems=[*line_problems(0, torn), "is empty"])
    if all(_is_number(cell) for cell in head if cell):
        raise ValueError(
            "has no header: its first line has only numbers; add the names of the columns"
        )
    rows: list[dict[str, Any]] = []
    kept, damaged, restarts = list[int](), list[int](), list[int]()
    known = True
    for number, cells in enumerate(table, 1):
        if cells and _is_header(cells, head):
            known = [cells[0].removeprefix(_MARK), *cells[1:]] == head
            if known:
                restarts.append(len(rows))
            else:
                damaged.append(number)
        elif cells and known and len(cells) == len(head):
            kept.append(number)
            rows.append({name: _cell(cell) for name, cell in zip(head, cells, strict=True) if cell})
        elif cells:
            damaged.append(number)
    lines = columns_of(rows, typed=False)
    problems = [] if rows else ["has a header, and no rows"]
    problems += [
        f"column {name} is there {head.count(name)} times; the last one counts"
        for name in dict.fromkeys(head)
        if head.count(name) > 1
    ]
    places: Sequence[int] = []
    if damaged or lines.misfits:
        places = [*_first_lines(text, delimiter)]
        where = {row: places[number] for row, number in enumerate(kept)}
        problems += misfit_problems(lines.misfits, where)
    shown = [places[number] for number in damaged[:_NAMED_LINES]]
    content = FileContent(lines, line_problems(len(damaged), torn, shown) + problems)
    if restarts and "restart" not in head:
        content.restarts = np.searchsorted(np.unique(restarts), np.arange(len(rows)), "right")
    return content


def _delimiter(first: str, usual: str) -> str:
    """Return the delimiter of a file with the line ``first``: its ``usual`` one, unless the line lacks it."""
    return usual if usual in first else max(_DELIMITERS, key=first.count) if first else usual


def _is_header(cells: Sequence[str], head: Sequence[str]) -> bool:
    """Return True if ``cells`` are names of columns, such as those of ``head``."""
    names = {cells[0].removeprefix(_MARK), *cells[1:]}
    return not names.isdisjoint(head) and not any(_is_number(cell) or not cell for cell in cells)


def _first_lines(text: str, delimiter: str) -> Iterator[int]:
    """Yield the number of the first line of each row; a cell in quotes may have line breaks."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    before = 0
    for _ in reader:
        yield before + 1
        before = reader.line_num


def _is_number(cell: str) -> bool:
    return not isinstance(_cell(cell), str)


def _cell(text: str) -> Any:
    for kind in (int, float):
        try:
            # Python takes 1_000 for a number.
            return text if "_" in text else kind(text)
        except ValueError:
            continue
    return text
