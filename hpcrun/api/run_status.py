"""The state of a run, as `hpcrun status --json` prints it."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypedDict

from hpcrun.api.file_clock import FileClock
from hpcrun.api.pace import METRICS_READ, PaceFacts, facts, total_steps
from hpcrun.api.state_words import (
    in_minutes,
    state_in_words,
)
from hpcrun.diagnose.brief import brief_cause
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import last_output
from hpcrun.run.files import read_lines
from hpcrun.run.goodput import goodput
from hpcrun.run.journal.events import Opened, Saved, Started
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.state import State
from hpcrun.run.reports import published
from hpcrun.run.slow_nodes import replaced_now, slow_now
from hpcrun.slurm.launch.jobs import RunState
from hpcrun.storage.manifest import has_commit

BRIEF = 0.5
"""Seconds of reading logs, for all runs of a table together, if no cause is kept."""


class RunRow(TypedDict):
    """The facts of a run, which `hpcrun status --json` prints.

    ``says``: the state in words. ``step`` of ``steps``; ``committed``: the step of a resume. Times are in
    seconds; ``starts``: Unix seconds. ``speed``: a value per second, by its unit. ``goodput``: seconds by
    kind. ``restarts``: by cause. An unknown value is None.
    """

    name: str
    state: str
    says: str
    step: int | None
    steps: int | None
    percent: float | None
    committed: int | None
    loss: float | None
    speed: dict[str, float] | None
    eta_seconds: float | None
    starts: float | None
    job: str | None
    executor: str | None
    attempts: int
    restarts: Mapping[str, int]
    in_place: int
    progress_seconds: float | None
    age_seconds: float
    goodput: dict[str, float | None]
    detail: str
    slow: list[str]
    replaced: list[str]
    diagnosis: str | None
    directory: str


def row_of(
    run_directory: RunDirectory,
    state: RunState,
    journal: State | None = None,
    *,
    diagnose: bool = True,
    clock: FileClock | None = None,
) -> RunRow:
    """Return the facts about a run in ``state`` as plain data; an unknown value is None.

    Args:
        journal: the state by its journal, if that has been read.
        diagnose: look for the cause of a failure in the logs.
        clock: the clocks of the file servers, if other runs are read too.

    Raises:
        OSError: the files of the run cannot be read.
    """
    journal = Journal(run_directory).read() if journal is None else journal
    pace = _pace(run_directory, journal)
    now = time.time()
    progress = (
        _live_progress(run_directory, journal, pace, clock or FileClock())
        if state.live
        else _last_sign(run_directory, journal, pace)
    )
    failed, running = state.word == "failed", state.word == "running"
    stepped = progress.stepped if running else None
    return {
        "name": run_directory.name,
        "state": state.word,
        "says": state_in_words(state, journal, now, progress.words if running else ""),
        "step": pace.step,
        "steps": pace.total,
        "percent": None if pace.percent is None else round(pace.percent, 1),
        "committed": _saved_step(run_directory, journal),
        # A loss that is not finite is null in metrics.jsonl, and again in --json.
        "loss": pace.loss,
        "speed": None if pace.speed is None else dict([pace.speed]),
        "eta_seconds": pace.left(progress.age) if running and progress.age is not None else None,
        "starts": state.starts,
        "job": state.job,
        "executor": state.executor,
        "attempts": len(journal.attempts),
        "restarts": journal.restarts,
        "in_place": journal.restarts_in_place,
        "progress_seconds": None if progress.age is None else round(progress.age),
        "age_seconds": round(now - journal.events[0].time) if journal.events else 0,
        "goodput": goodput(journal, progress.now, stepped, lost=not state.live).as_record(),
        "detail": state.detail,
        "slow": [one.line for one in slow_now(journal)] if running else [],
        "replaced": replaced_now(journal) if running else [],
        "diagnosis": brief_cause(run_directory, journal, BRIEF) if failed and diagnose else None,
        "directory": str(run_directory.path),
    }


def _pace(run: RunDirectory, journal: State) -> PaceFacts:
    pace = facts(read_lines(run.metrics, METRICS_READ), total_steps(run))
    return pace if pace.latest or pace.step else replace(pace, step=_reported_step(run, journal))


def _saved_step(run: RunDirectory, journal: State) -> int | None:
    """Return the step from which a resume starts, or None; for a script, its last reported save."""
    return journal.committed if journal.of_script or has_commit(run) else None


def _reported_step(run_directory: RunDirectory, journal: State) -> int | None:
    """Return the step that a script has reported in its newest attempt with a report."""
    for record in reversed(journal.attempts):
        try:
            logs = run_directory.attempt_logs(record.attempt)
            step = published(logs).step
        except OSError:
            continue
        if step is not None:
            return step
    return None


def _last_output(run: RunDirectory, journal: State) -> float | None:
    """Return the time of the newest output of a script, in Unix seconds; None for a task."""
    if journal.owner is None or not journal.of_script:
        return None
    with contextlib.suppress(OSError):
        return last_output(run.attempt_logs(journal.owner))
    return None


@dataclass(frozen=True)
class _Progress:
    """The last sign of progress, in the clock of the run's writers.

    ``now``: the present, or the last sign of a run without a job (Unix seconds). ``age``: seconds since the
    last step or output. ``stepped``: the time of the last step if the next one is overdue. ``words``: what is
    overdue.
    """

    now: float
    age: float | None
    stepped: float | None = None
    words: str = ""


# Seconds without the first step, and without output of a script.
_FIRST, _SILENT = 120.0, 600.0


def _live_progress(
    run: RunDirectory, journal: State, pace: PaceFacts, clock: FileClock
) -> _Progress:
    age, written = clock.age(run.metrics), clock.age(run.events)
    newest = journal.events[-1] if journal.events else None
    found_later = isinstance(newest, Saved) and newest.found
    known = newest is not None and written is not None and not found_later
    now = newest.time + written if known and newest and written is not None else time.time()
    begun = [*journal.of_kind(Opened, Started)][-1:]
    if not begun or not isinstance(begun[0], Started):
        # No line is of this attempt.
        return _Progress(now, None if pace.latest is None else age)
    stepped = pace.latest is not None and pace.latest >= begun[0].time - 1 and age is not None
    if stepped and age is not None:
        if pace.stalled(age):
            return _Progress(now, age, now - age, f"no step for {in_minutes(age)}")
        return _Progress(now, age)
    since = max(0.0, now - begun[0].time)
    if not journal.of_script:
        words = f"no step reported for {in_minutes(since)}" if since > _FIRST else ""
        return _Progress(now, since, None, words)
    output = _last_output(run, journal)
    silent = since if output is None else clock.since(output, run.path)
    words = f"no output for {in_minutes(silent)}" if silent > _SILENT else ""
    return _Progress(now, silent, None, words)


def _last_sign(run: RunDirectory, journal: State, pace: PaceFacts) -> _Progress:
    latest = pace.latest or _last_output(run, journal)
    signs = [event.time for event in journal.events[-1:]] + ([] if latest is None else [latest])
    age = None if latest is None else max(0.0, time.time() - latest)
    return _Progress(max(signs, default=time.time()), age)
