"""The runs and sweeps that `hpcrun status` shows: found by name, filtered and sorted."""

import fnmatch
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.api.status.sweep_rows import StatusEntry, folded, sweep_entries
from hpcrun.api.sweeps.unrecorded import record_killed_submission
from hpcrun.errors import UserError
from hpcrun.run.directory import RunDirectory, RunError, find
from hpcrun.run.sweep_file import NAME

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
        record_killed_submission(folder)
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
