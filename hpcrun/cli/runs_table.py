"""The runs that `hpcrun status` shows, and their table, as plain lines that fit the terminal."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm.utils import disp_len

from hpcrun.api.overview import StatusEntry, TableRow, folded, sweep_entries
from hpcrun.api.state_words import restarts_in_words
from hpcrun.cli.arguments import find_named
from hpcrun.cli.output import aligned
from hpcrun.errors import UserError
from hpcrun.printing import escaped
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.sweep_file import is_element, is_sweep

Row = Mapping[str, Any]

_GAP = 2
# Fits `running: no step for 119 min`.
_LEAST_STATE = 31
_MAX = {"name": 32, "values": 40}
_KEPT, _LEAST_VALUES = ("name", "values", "state", "loss"), 10
_DASH = "-"


def table_lines(rows: Sequence[Row], width: int) -> list[str]:
    """Return a heading and a line for each of ``rows``.

    Columns without a value are left out. If the table is wider than ``width``, the last columns are removed
    (except the loss), then values and state are cut.
    """
    columns = {
        heading: [heading, *(escaped(cell(row)) for row in rows)]
        for heading, cell in _COLUMNS.items()
    }
    columns = {
        heading: [_cut(cell, _MAX.get(heading, len(cell) * 2)) for cell in cells]
        for heading, cells in columns.items()
        if not rows or not set(cells[1:]) <= {"", _DASH}
    }
    widths = {heading: max(map(disp_len, cells)) for heading, cells in columns.items()}

    def room() -> int:
        """Return the columns that are left for the state."""
        return width - sum(widths.values()) - _GAP * (len(widths) - 1) + widths["state"]

    least = min(widths["state"], _LEAST_STATE)
    for heading in [name for name in reversed(widths) if name not in _KEPT]:
        if room() < least:
            del widths[heading]
    if room() < least and "values" in widths:
        widths["values"] = max(widths["values"] + room() - least, _LEAST_VALUES)
        columns["values"] = [_cut(cell, widths["values"]) for cell in columns["values"]]
    columns["state"] = [_cut(cell, max(room(), _LEAST_STATE)) for cell in columns["state"]]
    cells = zip(*(columns[heading] for heading in widths), strict=True)
    right = [index for index, heading in enumerate(widths) if heading not in _LEFT]
    return aligned([*cells], right)


def _dashed(key: str, form: Callable[[Any], str] = str) -> Callable[[Row], str]:
    """Return the cell of ``key``."""
    return lambda row: _DASH if row.get(key) is None else form(row[key])


def _step(row: Row) -> str:
    if row.get("step") is None:
        return _DASH
    return f"{row['step']}/{row['steps']}" if row.get("steps") else str(row["step"])


def _values(values: Mapping[str, Any]) -> str:
    """Return the swept values with the last components of their keys, if these differ."""
    last = [key.rpartition(".")[2] for key in values]
    keys = last if len(set(last)) == len(last) else [*values]
    return " ".join(f"{key}={value}" for key, value in zip(keys, values.values(), strict=True))


def _speed(row: Row) -> str:
    for unit, number in (row.get("speed") or {}).items():
        for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if number >= size:
                return f"{number / size:.3g}{letter} {unit}/s"
        return f"{number:.3g} {unit}/s"
    return _DASH


def _goodput(row: Row) -> str:
    share = row["ettr"] if "ettr" in row else row["goodput"]["ettr"]
    return _DASH if share is None else f"{100 * share:.0f}%"


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


# The most important first.
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "name": lambda row: str(row["name"]) + "/" * (row["kind"] == "sweep"),
    "values": lambda row: _values(row.get("values") or {}),
    "state": lambda row: str(row["says"]),
    "step": _step,
    "done": _dashed("percent", "{:.0f}%".format),
    "loss": _dashed("loss", "{:.4f}".format),
    "ETA": _dashed("eta_seconds", short_duration),
    "speed": _speed,
    "goodput": _goodput,
    "restarts": lambda row: restarts_in_words(row["restarts"], row.get("in_place", 0)),
    "saved": _dashed("committed"),
    "last": _dashed("progress_seconds", lambda seconds: f"{short_duration(seconds)} ago"),
    "attempts": _dashed("attempts"),
    "job": _dashed("job"),
    "executor": _dashed("executor"),
}
_LEFT = ("name", "values", "state", "restarts", "job", "executor")


def _cut(text: str, width: int) -> str:
    """Cut ``text`` at ``width`` columns, with a mark for what is missing."""
    if disp_len(text) <= width:
        return text
    while text and disp_len(text) > width - 1:
        text = text[:-1]
    return f"{text}…"


STATES = (
    *("new", "pending", "running", "suspended", "finished", "cancelled", "stopped", "failed"),
    *("pruned", "lost", "unreadable"),
)


def chosen(names: Sequence[str], runs_dir: Path) -> list[StatusEntry]:
    """Return the runs that ``names`` name, or all runs below ``runs_dir``, newest first.

    Raises:
        RunError: there is no such run.
    """
    entries: list[StatusEntry] = []
    for name in names:
        places = [place.absolute() for place in (runs_dir / name, Path(name))]
        sweep = next(filter(is_sweep, places), None)
        entries += sweep_entries(sweep) if sweep else [_entry(find_named(name, runs_dir))]
    return entries if names else _everything(runs_dir)


def _everything(runs_dir: Path) -> list[StatusEntry]:
    """Return all runs that this user may read, with those of sweeps."""
    found: list[tuple[float, list[StatusEntry]]] = []
    for path in (*runs_dir.glob("*/run.json"), *runs_dir.glob("*/sweep.json")):
        folder = path.parent
        try:
            entries = sweep_entries(folder) if is_sweep(folder) else [_entry(RunDirectory(folder))]
            found.append((path.stat().st_mtime, entries))
        except (OSError, RunError):
            continue
    found.sort(key=lambda one: one[0], reverse=True)
    return [entry for _, entries in found for entry in entries]


def _entry(run: RunDirectory) -> StatusEntry:
    return StatusEntry(run.name, run, run.path.parent.name if is_element(run) else None)


def fold(rows: Sequence[TableRow], runs_dir: Path) -> list[Row]:
    """Return ``rows`` with one row for each sweep of ``runs_dir``, in the place of its first run."""
    sweeps = {name for name in {row["sweep"] for row in rows} if name and is_sweep(runs_dir / name)}
    groups: dict[str, list[TableRow]] = {}
    for row in rows:
        sweep = row["sweep"] if row["sweep"] in sweeps else None
        groups.setdefault(sweep or f"/{row['name']}", []).append(row)
    return [
        folded(name, group, runs_dir / name) if name in sweeps else group[0]
        for name, group in groups.items()
    ]


def wanted_states(text: str | None) -> frozenset[str] | None:
    """Read ``running,failed``; raises UserError for a word that is no state."""
    if text is None:
        return None
    # The table prints `waiting` for a pending run.
    words = [word.strip().replace("waiting", "pending") for word in text.split(",")]
    for word in words:
        if word not in STATES:
            raise UserError(
                f"--state {word}: invalid choice; choose from {', '.join(STATES)}, with commas for several"
            )
    return frozenset(words)
