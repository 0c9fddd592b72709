"""The rows of many runs, from one query to the scheduler and the runs' files."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from hpcrun.api.file_clock import FileClock
from hpcrun.api.run_status import BRIEF, RunRow, row_of
from hpcrun.diagnose.brief import brief_cause
from hpcrun.run.directory import RunDirectory
from hpcrun.run.goodput import Goodput
from hpcrun.run.journal.journal import StateCache, signature
from hpcrun.run.sweep_file import read_sweep
from hpcrun.slurm.launch import jobs
from hpcrun.slurm.launch.jobs import RunState

_WORDS = {"pending": "waiting", "new": "not submitted"}
_ORDER = (
    *("finished", "running", "suspended", "pending", "new", "failed", "lost", "cancelled"),
    *("pruned", "stopped", "unreadable"),
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
    values: Mapping[str, object] | None = None


class TableRow(RunRow):
    """The facts of a run in a table of many; ``sweep`` and ``values``: only for a run of a sweep."""

    kind: str
    sweep: str | None
    values: dict[str, object] | None


class SweepRow(TypedDict):
    """The facts of a sweep, from those of its ``runs``; ``counts``: runs by state."""

    name: str
    kind: str
    state: str
    says: str
    runs: int
    counts: dict[str, int]
    percent: float | None
    eta_seconds: float | None
    restarts: dict[str, int]
    ettr: float | None
    executor: str | None
    directory: str


def sweep_entries(folder: Path) -> list[StatusEntry]:
    """Return the runs of the sweep in ``folder``, in the order of the file.

    Raises:
        RunError: the file is damaged.
        OSError: the file exists but cannot be read.
    """
    sweep = read_sweep(folder)
    if sweep is None:
        return []
    return [
        StatusEntry(
            f"{folder.name}/{one.name}", RunDirectory(folder / one.name), folder.name, one.values
        )
        for one in sweep.runs
    ]


def folded(name: str, rows: Sequence[RunRow], folder: Path) -> SweepRow:
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
        "executor": max((row["executor"] or "" for row in rows), default="") or None,
        "directory": str(folder),
    }


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Return ``20 runs: 12 finished, 5 running, 3 waiting``."""
    reported = [f"{counts[word]} {_WORDS.get(word, word)}" for word in _ORDER if counts.get(word)]
    number = sum(counts.values())
    return f"{number} run{'s' * (number != 1)}: {', '.join(reported)}" if reported else "no runs"


def _share(rows: Sequence[RunRow]) -> float | None:
    """Return the productive share of the time of all runs, from submission to end."""
    known = [row["goodput"] for row in rows if row["goodput"]["ettr"] is not None]
    productive = sum(parts["productive"] or 0.0 for parts in known)
    wanted = sum(
        (parts["wall"] or 0.0) - (parts["idle"] or 0.0) - (parts["unsaved"] or 0.0)
        for parts in known
    )
    return round(productive / wanted, 4) if wanted > 0 else None


# Seconds. The batch step writes the result before its job ends, so Slurm may still have the job.
_SETTLED = 600.0
# A diagnosis reads up to 64 logs. Older failures are shown with the recorded reason.
_MOST_DIAGNOSES = 20


class Overview:
    """The rows of ``entries``; a second read takes only what has changed since the first."""

    def __init__(self, entries: Sequence[StatusEntry]) -> None:
        self.entries = entries
        self._events: StateCache | None = None
        self._diagnoses: dict[tuple[Path, tuple[object, ...]], str | None] = {}
        self._clock = FileClock()
        self.answered = True

    def look(self) -> list[TableRow]:
        """Return a row for each entry: the facts of ``row_of``, and ``kind``, ``sweep`` and ``values``.

        A run that cannot be read has the state ``unreadable``. Afterwards ``answered`` is true if the
        scheduler has answered.
        """
        events = StateCache(self._events)
        errors: dict[Path, OSError] = {}
        for entry in self.entries:
            try:
                events(entry.run)
            except OSError as error:
                errors[entry.run.path] = error
        readable = [entry.run for entry in self.entries if entry.run.path not in errors]
        states = _states(readable, events, errors)
        self.answered = all(state.asked for state in states.values())
        rows = list[TableRow]()
        for entry in self.entries:
            run = entry.run
            try:
                if run.path not in states:
                    raise errors[run.path]
                row = row_of(run, states[run.path], events(run), diagnose=False, clock=self._clock)
            except OSError as error:
                row = _unreadable(run, error)
            values = None if entry.values is None else dict(entry.values)
            rows.append(
                {**row, "name": entry.name, "kind": "run", "sweep": entry.sweep, "values": values}
            )
        self._events = events
        failed = [row for row in rows if row["state"] == "failed"]
        failed.sort(key=lambda row: float(row["age_seconds"]))
        until = time.thread_time() + BRIEF
        for row in failed[:_MOST_DIAGNOSES]:
            row["diagnosis"] = self._diagnosis(RunDirectory(Path(row["directory"])), events, until)
        return rows

    def _diagnosis(self, run: RunDirectory, events: StateCache, until: float) -> str | None:
        """Return the cause of a failure; the logs are read again only if the run has gone on."""
        mark = tuple(signature(path) for path in (run.events, run.result))
        if (run.path, mark) not in self._diagnoses:
            left = until - time.thread_time()
            self._diagnoses[run.path, mark] = brief_cause(run, events(run), left)
        return self._diagnoses[run.path, mark]


def _has_settled(run: RunDirectory) -> bool:
    """Return True if the run's end was recorded so long ago that no job can have the run.

    A new submission removes the result.
    """
    try:
        return time.time() - run.result.stat().st_mtime > _SETTLED
    except OSError:
        return False


def _states(
    runs: Sequence[RunDirectory], events: StateCache, errors: dict[Path, OSError]
) -> dict[Path, RunState]:
    """Return the state of each run by its path; a run that cannot be read is in ``errors`` instead."""
    try:
        found = jobs.states(runs, events, _has_settled)
        return dict(zip((run.path for run in runs), found, strict=True))
    except OSError as error:
        if len(runs) == 1:
            errors[runs[0].path] = error
            return {}
    # The files of one run cannot be read. Halving the list finds this run with few queries to Slurm.
    half = len(runs) // 2
    return _states(runs[:half], events, errors) | _states(runs[half:], events, errors)


def _unreadable(run: RunDirectory, error: OSError) -> RunRow:
    reason = f"{error.filename or run.path}: {error.strerror or error}"
    state = RunState("unreadable", reason, False, None, None)
    return {
        "name": run.name,
        "state": state.word,
        "says": f"unreadable: {reason}",
        "step": None,
        "steps": None,
        "percent": None,
        "committed": None,
        "loss": None,
        "speed": None,
        "eta_seconds": None,
        "starts": None,
        "job": None,
        "executor": None,
        "attempts": 0,
        "restarts": {},
        "in_place": 0,
        "progress_seconds": None,
        "age_seconds": 0,
        "goodput": Goodput().as_record(),
        "detail": reason,
        "slow": [],
        "replaced": [],
        "diagnosis": None,
        "directory": str(run.path),
    }
