"""The table of `hpcrun status`, as plain lines that fit the terminal."""

import fnmatch
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.api.overview import StatusEntry, folded, sweep_entries
from hpcrun.api.state_words import restarts_in_words
from hpcrun.cli.output import cells_wide
from hpcrun.errors import UserError
from hpcrun.printing import escaped
from hpcrun.run.directory import RunDirectory, RunError, find
from hpcrun.run.sweep_file import NAME

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


STATES = (
    *("new", "pending", "running", "suspended", "finished", "cancelled", "stopped", "failed"),
    *("lost", "unreadable"),
)
# The word that the table prints for a state.
_ALIASES = {"waiting": "pending"}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}

SORTS = {
    "new": ("age_seconds", False),
    "old": ("age_seconds", True),
    "name": ("name", False),
    "state": ("state", False),
    "step": ("step", True),
    "done": ("percent", True),
    "loss": ("loss", False),
    "eta": ("eta_seconds", False),
    "restarts": ("restarts", True),
}
"""For each word of --sort: the key of a row, and whether the largest value comes first."""


@dataclass(frozen=True)
class Selection:
    """The runs to look at. ``folders``: the folder of each sweep that is shown in one line."""

    entries: Sequence[StatusEntry]
    folders: dict[str, Path]


def named(names: Sequence[str], runs_dir: Path) -> Selection:
    """Return the runs that ``names`` name; a sweep's name means all its runs.

    Raises:
        RunError: there is no such run.
    """
    entries: list[StatusEntry] = []
    for name in names:
        folder = _sweep_folder(name, runs_dir)
        if folder is None:
            run = find(name, runs_dir)
            entries.append(_entry(run))
            continue
        entries += sweep_entries(folder)
    return Selection(entries, {})


def everything(runs_dir: Path) -> Selection:
    """Return all runs below ``runs_dir`` that this user may read, newest first, with those of sweeps."""
    found: list[tuple[float, list[StatusEntry]]] = []
    folders = {}
    for record in _files(runs_dir, "*/run.json"):
        found.append((record[1], [_entry(RunDirectory(record[0].parent))]))
    for listed, changed in _files(runs_dir, f"*/{NAME}"):
        folder = listed.parent
        try:
            entries = sweep_entries(folder)
        except (OSError, RunError):
            continue
        folders[folder.name] = folder
        found.append((changed, entries))
    found.sort(key=lambda one: one[0], reverse=True)
    return Selection([entry for _, entries in found for entry in entries], folders)


def fold(rows: Iterable[dict[str, Any]], folders: dict[str, Path]) -> list[dict[str, Any]]:
    """Return ``rows`` with one row for each sweep of ``folders``, in the place of its first run."""
    members: dict[str, list[dict[str, Any]]] = {}
    order: list[dict[str, Any] | str] = []
    for row in rows:
        sweep = row["sweep"]
        if sweep not in folders:
            order.append(row)
            continue
        if sweep not in members:
            order.append(sweep)
        members.setdefault(sweep, []).append(row)
    return [
        folded(one, members[one], folders[one]) if isinstance(one, str) else one for one in order
    ]


def narrowed(selection: Selection, pattern: str | None, since: float | None) -> Selection:
    """Return the recently active runs with a name, or a sweep's name, that matches ``pattern``.

    Args:
        since: seconds since the newest line of the run's files; None: any.
    """
    entries = [
        entry
        for entry in selection.entries
        if pattern is None
        or fnmatch.fnmatchcase(entry.name, pattern)
        or fnmatch.fnmatchcase(entry.sweep or entry.name, pattern)
    ]
    if since is not None:
        first = time.time() - since
        entries = [entry for entry in entries if _active(entry.run) >= first]
    return Selection(entries, selection.folders)


def wanted_states(text: str | None) -> frozenset[str] | None:
    """Read ``running,failed``; raises UserError for a word that is no state."""
    if text is None:
        return None
    words = [_ALIASES.get(word.strip(), word.strip()) for word in text.split(",")]
    for word in words:
        if word not in STATES:
            raise UserError(
                f"--state {word}: invalid choice; choose from {', '.join(STATES)}, with commas for several"
            )
    return frozenset(words)


def period(text: str | None) -> float | None:
    """Read ``2d``, ``12h`` or ``30m`` as seconds; raises UserError for another text."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([smhdw])", text.strip())
    if found is None:
        raise UserError(f"--since {text}: give a number with s, m, h, d or w, such as 2d")
    return float(found[1]) * _UNITS[found[2]]


def in_order(rows: list[dict[str, Any]], sort: str | None) -> list[dict[str, Any]]:
    """Return ``rows`` sorted by a word of SORTS; rows without a value come last."""
    if sort is None:
        return rows
    key, largest = SORTS[sort]
    known = [row for row in rows if _value(row, key) is not None]
    known.sort(key=lambda row: _value(row, key), reverse=largest)
    return [*known, *(row for row in rows if _value(row, key) is None)]


def _value(row: dict[str, Any], key: str) -> Any:
    value = row.get(key)
    if key == "restarts":
        return sum(row["restarts"].values())
    # NaN compares as neither smaller nor larger, so it counts as missing.
    return None if value != value else value


def _entry(run: RunDirectory) -> StatusEntry:
    folder = run.path.parent
    if (folder / NAME).is_file():
        return StatusEntry(f"{folder.name}/{run.path.name}", run, folder.name)
    return StatusEntry(run.path.name, run)


def _sweep_folder(name: str, runs_dir: Path) -> Path | None:
    try:
        places = (runs_dir / name, Path(name))
        return next((place.absolute() for place in places if (place / NAME).is_file()), None)
    except OSError:
        return None


def _files(folder: Path, pattern: str) -> list[tuple[Path, float]]:
    """The files that this user may see, each with the time of its last change."""
    found = []
    for path in folder.glob(pattern):
        try:
            found.append((path, path.stat().st_mtime))
        except OSError:
            continue
    return found


def _active(run: RunDirectory) -> float:
    times = [0.0]
    for path in (run.events, run.metrics, run.result, run.record):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times)
