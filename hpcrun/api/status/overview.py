"""The rows of many runs, from one query to the scheduler and the last lines of the runs' files."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrun.api.status.run_status import diagnosis_of, row_of
from hpcrun.api.status.sweep_rows import StatusEntry
from hpcrun.job.goodput import Goodput
from hpcrun.run.directory import RunDirectory
from hpcrun.run.last_lines import EVENTS_READ, RecentEvents, signature
from hpcrun.slurm.launch import jobs
from hpcrun.slurm.launch.jobs import RunState

# Seconds. The batch step writes the result before its job ends, so Slurm may still have the job.
_SETTLED = 600.0
# A diagnosis reads up to 64 logs. Older failures are shown with the recorded reason.
_MOST_DIAGNOSES = 20

_Mark = tuple[RunState, tuple[tuple[int, int, int] | None, ...]]


class Overview:
    """The rows of ``entries``; a second read takes only what has changed since the first.

    Args:
        whole: read whole event logs, for a few runs that a person has named.
    """

    def __init__(self, entries: Sequence[StatusEntry], *, whole: bool = False) -> None:
        self.entries = entries
        self._size = None if whole else EVENTS_READ
        self._recent: RecentEvents | None = None
        self._rows: dict[Path, tuple[_Mark, dict[str, Any]]] = {}
        self._diagnoses: dict[Path, tuple[_Mark, str | None]] = {}
        self.answered = True

    def look(self) -> list[dict[str, Any]]:
        """Return a row for each entry: the facts of ``row_of``, and ``kind``, ``sweep`` and ``values``.

        A run that cannot be read has the state ``unreadable``. Afterwards ``answered`` is true if the
        scheduler has answered.
        """
        recent = RecentEvents(self._recent, self._size)
        errors: dict[Path, OSError] = {}
        for entry in self.entries:
            try:
                recent.of(entry.run)
            except OSError as error:
                errors[entry.run.path] = error
        readable = [entry.run for entry in self.entries if entry.run.path not in errors]
        states = _states(readable, recent, errors)
        self.answered = all(state.asked for state in states.values())
        rows = []
        for entry in self.entries:
            state = states.get(entry.run.path)
            try:
                if state is None:
                    raise errors[entry.run.path]
                row = self._row(entry.run, state, recent)
            except OSError as error:
                row = _unreadable(entry.run, error)
            rows.append(row | _identity(entry))
        self._recent = recent
        self._add_diagnoses(rows, states, recent)
        return rows

    def _row(self, run: RunDirectory, state: RunState, recent: RecentEvents) -> dict[str, Any]:
        mark = _mark(run, state)
        known = self._rows.get(run.path)
        if known is not None and known[0] == mark and not state.live:
            return known[1]
        row = row_of(run, state, recent.of(run), diagnose=False)
        self._rows[run.path] = mark, row
        return row

    def _add_diagnoses(
        self, rows: list[dict[str, Any]], states: dict[Path, RunState], recent: RecentEvents
    ) -> None:
        failed = [row for row in rows if row["state"] == "failed"]
        failed.sort(key=lambda row: float(row["age_seconds"]))
        for row in failed[:_MOST_DIAGNOSES]:
            run = RunDirectory(Path(row["directory"]))
            mark = _mark(run, states[run.path])
            known = self._diagnoses.get(run.path)
            if known is None or known[0] != mark:
                known = mark, diagnosis_of(run, recent(run))
                self._diagnoses[run.path] = known
            row["diagnosis"] = known[1]


def _identity(entry: StatusEntry) -> dict[str, Any]:
    values = None if entry.values is None else dict(entry.values)
    return {"name": entry.name, "kind": "run", "sweep": entry.sweep, "values": values}


def _mark(run: RunDirectory, state: RunState) -> _Mark:
    return state, tuple(signature(path) for path in (run.events, run.metrics, run.result))


def _has_settled(run: RunDirectory) -> bool:
    """Return True if the run's end was recorded so long ago that no job can have the run.

    A new submission removes the result.
    """
    try:
        return time.time() - run.result.stat().st_mtime > _SETTLED
    except OSError:
        return False


def _states(
    runs: Sequence[RunDirectory], recent: RecentEvents, errors: dict[Path, OSError]
) -> dict[Path, RunState]:
    """Return the state of each run by its path; a run that cannot be read is in ``errors`` instead."""
    try:
        found = jobs.states(runs, recent, _has_settled)
        return dict(zip((run.path for run in runs), found, strict=True))
    except OSError as error:
        if len(runs) == 1:
            errors[runs[0].path] = error
            return {}
    # The files of one run cannot be read. Halving the list finds this run with few queries to Slurm.
    half = len(runs) // 2
    return _states(runs[:half], recent, errors) | _states(runs[half:], recent, errors)


def _unreadable(run: RunDirectory, error: OSError) -> dict[str, Any]:
    reason = f"{error.filename or run.path}: {error.strerror or error}"
    state = RunState("unreadable", reason, False, None, None)
    return {
        **dict.fromkeys(
            ("step", "steps", "percent", "committed", "loss", "speed", "eta_seconds", "starts")
        ),
        **dict.fromkeys(("job", "executor", "progress_seconds", "diagnosis")),
        "name": run.name,
        "state": state.word,
        "says": f"unreadable: {reason}",
        "attempts": 0,
        "restarts": {},
        "whole_history": False,
        "age_seconds": 0,
        "goodput": Goodput().as_record(),
        "detail": reason,
        "directory": str(run.path),
    }
