"""The state of a run, as `hpcrun status --json` prints it."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcrun.api.file_clock import FileClock
from hpcrun.api.pace import METRICS_READ, PaceFacts, facts, total_steps
from hpcrun.api.state_words import (
    in_minutes,
    restarts_by_cause,
    restarts_in_place,
    state_in_words,
)
from hpcrun.checkpoint.storage.manifest import has_commit
from hpcrun.diagnose.brief import brief_cause
from hpcrun.job.history import all_histories, last_committed, of_script
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import last_output
from hpcrun.run.events import Event, read_events
from hpcrun.run.files import read_lines
from hpcrun.run.goodput import goodput
from hpcrun.run.reports import published
from hpcrun.run.slow_nodes import replaced_now, slow_now
from hpcrun.slurm.launch.jobs import RunState

BRIEF = 0.5
"""Seconds of reading logs, for all runs of a table together, if no cause is kept."""


def row_of(
    run_directory: RunDirectory,
    state: RunState,
    events: Sequence[Event] | None = None,
    *,
    diagnose: bool = True,
    clock: FileClock | None = None,
) -> dict[str, Any]:
    """Return the facts about a run in ``state`` as plain data; an unknown value is None.

    Args:
        events: the events, if they have been read.
        diagnose: look for the cause of a failure in the logs.
        clock: the clocks of the file servers, if other runs are read too.

    Raises:
        OSError: the files of the run cannot be read.
    """
    events = read_events(run_directory) if events is None else events
    pace = _pace(run_directory, events)
    now = time.time()
    progress = (
        _live_progress(run_directory, events, pace, clock or FileClock())
        if state.live
        else _last_sign(run_directory, events, pace)
    )
    failed, running = state.word == "failed", state.word == "running"
    stepped = progress.stepped if running else None
    return {
        "name": run_directory.name,
        "state": state.word,
        "says": state_in_words(state, events, now, progress.words if running else ""),
        "step": pace.step,
        "steps": pace.total,
        "percent": None if pace.percent is None else round(pace.percent, 1),
        "committed": _saved_step(run_directory, events),
        # A loss that is not finite is null in metrics.jsonl, and again in --json.
        "loss": pace.loss,
        "speed": None if pace.speed is None else dict([pace.speed]),
        "eta_seconds": pace.left(progress.age) if running and progress.age is not None else None,
        "starts": state.starts,
        "job": state.job,
        "executor": state.executor,
        "attempts": len(all_histories(events)),
        "restarts": restarts_by_cause(events),
        "in_place": restarts_in_place(events),
        "progress_seconds": None if progress.age is None else round(progress.age),
        "age_seconds": round(now - events[0].time) if events else 0,
        "goodput": goodput(events, progress.now, stepped, lost=not state.live).as_record(),
        "detail": state.detail,
        "slow": [one.line for one in slow_now(events)] if running else [],
        "replaced": replaced_now(events) if running else [],
        "diagnosis": brief_cause(run_directory, events, BRIEF) if failed and diagnose else None,
        "directory": str(run_directory.path),
    }


def _pace(run: RunDirectory, events: Sequence[Event]) -> PaceFacts:
    pace = facts(read_lines(run.metrics, METRICS_READ), total_steps(run))
    return pace if pace.latest or pace.step else replace(pace, step=_reported_step(run, events))


def _saved_step(run: RunDirectory, events: Sequence[Event]) -> int | None:
    """Return the step from which a resume starts, or None; for a script, its last reported save."""
    kept = of_script(events) or has_commit(run)
    return last_committed(events) if kept else None


def _reported_step(run_directory: RunDirectory, events: Sequence[Event]) -> int | None:
    """Return the step that a script has reported in its newest attempt with a report."""
    for record in reversed(all_histories(events)):
        try:
            logs = run_directory.attempt_logs(record.attempt)
            step = published(logs).step
        except OSError:
            continue
        if step is not None:
            return step
    return None


def _last_output(run: RunDirectory, events: Sequence[Event]) -> float | None:
    """Return the time of the newest output of a script, in Unix seconds; None for a task."""
    opened = [event.attempt for event in events if event.what == "opened" and event.attempt]
    if not opened or not of_script(events):
        return None
    with contextlib.suppress(OSError):
        return last_output(run.attempt_logs(opened[-1]))
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
    run: RunDirectory, events: Sequence[Event], pace: PaceFacts, clock: FileClock
) -> _Progress:
    age, written = clock.age(run.metrics), clock.age(run.events)
    known = events and written is not None and not events[-1].fields.get("found")
    now = events[-1].time + written if known and written is not None else time.time()
    begun = [event for event in events if event.what in ("opened", "started")][-1:]
    if not begun or begun[0].what != "started":
        # No line is of this attempt.
        return _Progress(now, None if pace.latest is None else age)
    stepped = pace.latest is not None and pace.latest >= begun[0].time - 1 and age is not None
    if stepped and age is not None:
        if pace.stalled(age):
            return _Progress(now, age, now - age, f"no step for {in_minutes(age)}")
        return _Progress(now, age)
    since = max(0.0, now - begun[0].time)
    if not of_script(events):
        words = f"no step reported for {in_minutes(since)}" if since > _FIRST else ""
        return _Progress(now, since, None, words)
    output = _last_output(run, events)
    silent = since if output is None else clock.since(output, run.path)
    words = f"no output for {in_minutes(silent)}" if silent > _SILENT else ""
    return _Progress(now, silent, None, words)


def _last_sign(run: RunDirectory, events: Sequence[Event], pace: PaceFacts) -> _Progress:
    latest = pace.latest or _last_output(run, events)
    signs = [event.time for event in events[-1:]] + ([] if latest is None else [latest])
    age = None if latest is None else max(0.0, time.time() - latest)
    return _Progress(max(signs, default=time.time()), age)
