"""The runs of a sweep, from its sweep.json, and a line about all of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.api.sweeps.unrecorded import record_killed_submission
from hpcrun.run.directory import RunDirectory
from hpcrun.run.sweep_file import read_sweep

_WORDS = {"pending": "waiting", "new": "not submitted"}
_ORDER = (
    *("finished", "running", "suspended", "pending", "new", "failed", "lost", "cancelled"),
    *("stopped", "unreadable"),
)
# The state of a sweep is the first of these states that occurs among its runs.
_LEADING = (
    *("running", "suspended", "pending", "failed", "lost", "unreadable", "cancelled", "stopped"),
    "new",
)


@dataclass(frozen=True)
class StatusEntry:
    """A run of the table. ``name``: the shown name; ``sweep`` and ``values``: only for a run of a sweep."""

    name: str
    run: RunDirectory
    sweep: str | None = None
    values: Mapping[str, Any] | None = None


def sweep_entries(folder: Path) -> list[StatusEntry]:
    """Return the runs of the sweep in ``folder``, in the order of the file.

    Arrays of a killed submission are recorded first.

    Raises:
        RunError: the file is damaged.
        OSError: the file exists but cannot be read.
    """
    sweep = read_sweep(folder)
    if sweep is None:
        return []
    if not all(one.jobs for one in sweep.submissions):
        record_killed_submission(folder)
    return [
        StatusEntry(
            f"{folder.name}/{one.name}", RunDirectory(folder / one.name), folder.name, one.values
        )
        for one in sweep.runs
    ]


def folded(name: str, rows: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """Return one row for the sweep ``name``, from the ``rows`` of its runs."""
    counts = Counter(row["state"] for row in rows)
    restarts: Counter[str] = Counter()
    for row in rows:
        restarts.update(row["restarts"])
    shares = [row["percent"] for row in rows if row["percent"] is not None]
    left = [row["eta_seconds"] for row in rows if row["eta_seconds"] is not None]
    return {
        "name": name,
        "kind": "sweep",
        "state": next((word for word in _LEADING if counts[word]), "finished"),
        "says": counts_in_words(counts),
        "runs": len(rows),
        "counts": dict(counts),
        # A run without a step has finished no step.
        "percent": round(sum(shares) / len(rows), 1) if shares else None,
        "eta_seconds": max(left, default=None),
        "restarts": dict(restarts.most_common()),
        "ettr": _share(rows),
        "directory": str(folder),
    }


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Return ``20 runs: 12 finished, 5 running, 3 waiting``."""
    told = [f"{counts[word]} {_WORDS.get(word, word)}" for word in _ORDER if counts.get(word)]
    number = sum(counts.values())
    return f"{number} run{'s' * (number != 1)}: {', '.join(told)}" if told else "no runs"


def _share(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the productive share of the time of all runs, from submission to end."""
    productive = sum(row["goodput"]["productive"] for row in rows)
    wanted = sum(row["goodput"]["wall"] - row["goodput"]["idle"] for row in rows)
    return round(productive / wanted, 4) if wanted > 0 else None
