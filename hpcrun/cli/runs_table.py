"""The table of `hpcrun status`, as plain lines that fit the terminal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrun.api.status.state_words import restarts_in_words
from hpcrun.cli.output import cells_wide
from hpcrun.printing import escaped

Row = Mapping[str, Any]

_GAP = 2
_LEAST_STATE, _MOST_NAME, _MOST_VALUES, _MOST = 24, 32, 40, 100_000
_DASH = "-"


@dataclass(frozen=True)
class Column:
    """A column: its heading, the text of a row's cell, and its side."""

    heading: str
    cell: Callable[[Row], str]
    right: bool = True


def table_lines(rows: Sequence[Row], width: int) -> list[str]:
    """Return a heading and a line for each of ``rows``.

    If the table is wider than ``width``, columns without a value are removed first, then the last columns;
    then the state is cut. The most important columns come first.
    """
    columns = _columns(rows)
    cells = [[column.heading for column in columns]]
    cells += [[escaped(column.cell(row)) for column in columns] for row in rows]
    most = {"name": _MOST_NAME, "values": _MOST_VALUES}
    told = [index for index in range(len(columns)) if _tells(cells, index)]
    columns = [columns[index] for index in told]
    limits = [most.get(column.heading, _MOST) for column in columns]
    cells = [
        [_cut(line[index], limit) for index, limit in zip(told, limits, strict=True)]
        for line in cells
    ]
    widths = [max(map(cells_wide, column)) for column in zip(*cells, strict=True)]
    state = next(index for index, column in enumerate(columns) if column.heading == "state")
    shown = _fitting(widths, state, width)
    room = width - sum(widths[index] + _GAP for index in shown if index != state)
    widths[state] = min(widths[state], max(room, _LEAST_STATE))
    return [_line(line, columns, widths, shown) for line in cells]


def _tells(cells: Sequence[Sequence[str]], index: int) -> bool:
    """Return True if a row has a value in the column."""
    return len(cells) == 1 or any(line[index] not in ("", _DASH) for line in cells[1:])


def _fitting(widths: list[int], state: int, width: int) -> list[int]:
    """Return the columns that fit next to a state of the least width, from the first column on."""
    shown = list(range(len(widths)))

    def needed() -> int:
        least = min(widths[state], _LEAST_STATE)
        return sum((least if index == state else widths[index]) + _GAP for index in shown) - _GAP

    while needed() > width and len(shown) > state + 2:
        shown.pop()
    return shown


def _line(
    line: Sequence[str], columns: Sequence[Column], widths: Sequence[int], shown: Sequence[int]
) -> str:
    parts = []
    for index in shown:
        text = _cut(line[index], widths[index])
        blank = " " * (widths[index] - cells_wide(text))
        parts.append(blank + text if columns[index].right else text + blank)
    return (" " * _GAP).join(parts).rstrip()


def _columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns, the most important first; ``values`` only for the runs of a sweep."""
    columns = [
        Column("name", lambda row: str(row["name"]) + "/" * (row["kind"] == "sweep"), False),
        Column("values", _values, False),
        Column("state", lambda row: str(row["says"]), False),
        Column("step", _step),
        Column("done", lambda row: _dashed(row["percent"], "{:.0f}%")),
        Column("loss", lambda row: _dashed(row.get("loss"), "{:.4f}")),
        Column("ETA", lambda row: _dashed(row["eta_seconds"], "", short_duration)),
        Column("speed", _speed),
        Column("goodput", _goodput),
        Column("restarts", lambda row: restarts_in_words(row["restarts"]), False),
        Column("saved", lambda row: _dashed(row.get("committed"), "{}")),
        Column(
            "last", lambda row: _dashed(row.get("progress_seconds"), "", lambda s: f"{age(s)} ago")
        ),
        Column("attempts", lambda row: _dashed(row.get("attempts"), "{}")),
        Column("job", lambda row: _dashed(row.get("job"), "{}"), False),
        Column("executor", lambda row: _dashed(row.get("executor"), "{}"), False),
    ]
    optional = () if any(row.get("values") for row in rows) else ("values",)
    return [column for column in columns if column.heading not in optional]


def _dashed(value: Any, form: str, words: Callable[[Any], str] | None = None) -> str:
    if value is None:
        return _DASH
    return words(value) if words else form.format(value)


def _values(row: Row) -> str:
    return " ".join(f"{key}={value}" for key, value in (row.get("values") or {}).items())


def _step(row: Row) -> str:
    if row.get("step") is None:
        return _DASH
    return f"{row['step']}/{row['steps']}" if row.get("steps") else str(row["step"])


def _speed(row: Row) -> str:
    told = [f"{_short(number)} {unit}/s" for unit, number in (row.get("speed") or {}).items()]
    return told[0] if told else _DASH


def _goodput(row: Row) -> str:
    share = row["ettr"] if "ettr" in row else row["goodput"]["ettr"]
    return _dashed(share, "", lambda value: f"{100 * value:.0f}%")


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def short_duration(seconds: float) -> str:
    """Return seconds as ``45s``, ``12m``, ``3h05m`` or ``2d03h``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m" if minutes else f"{rest}s"


def age(seconds: float) -> str:
    """Return a time in its largest unit: ``42 s``, ``5 min``, ``3 h``, ``12 d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _cut(text: str, width: int) -> str:
    """Cut ``text`` at ``width`` columns, with a mark for what is missing."""
    if cells_wide(text) <= width:
        return text
    kept = text
    while kept and cells_wide(kept) > width - 1:
        kept = kept[:-1]
    return f"{kept}…"
