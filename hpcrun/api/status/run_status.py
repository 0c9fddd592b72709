"""The state of a run, as `hpcrun status --json` prints it."""

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hpcrun.api.status.pace_facts import PaceFacts, pace_of
from hpcrun.api.status.state_words import restarts_by_cause, state_in_words
from hpcrun.checkpoint.storage.steps import has_commit
from hpcrun.diagnose.finding import find_cause
from hpcrun.diagnose.run_lines import attempt_to_diagnose, lines_of_attempt, nodes_of
from hpcrun.job.goodput import goodput
from hpcrun.job.history import all_histories, last_committed, of_script
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import last_output
from hpcrun.run.events import Event, read_events
from hpcrun.run.io.files import read_json
from hpcrun.run.last_lines import Recent
from hpcrun.run.reports import published
from hpcrun.slurm.launch.jobs import RunState

# Bytes read from each log, because many runs are shown together. `hpcrun doctor` reads more.
_HEAD, _TAIL, _MOST_FILES = 1 << 14, 1 << 16, 64


def row_of(
    run_directory: RunDirectory,
    state: RunState,
    recent: Recent | None = None,
    *,
    diagnose: bool = True,
) -> dict[str, Any]:
    """Return the facts about a run in ``state`` as plain data; an unknown value is None.

    Args:
        recent: the newest events, if they have been read; None: read all events now.
        diagnose: look for the cause of a failure in the logs.

    Raises:
        OSError: the files of the run cannot be read.
    """
    log = recent or _all_events(run_directory)
    events, now = log.events, time.time()
    pace = _pace(run_directory, events)
    failed = state.word == "failed"
    return {
        "name": run_directory.name,
        "state": state.word,
        "says": state_in_words(state, events, now),
        "step": pace.step,
        "steps": pace.total,
        "percent": None if pace.percent is None else round(pace.percent, 1),
        "committed": _saved_step(run_directory, events),
        # A loss that is not finite is null in metrics.jsonl, and again in --json.
        "loss": pace.loss,
        "speed": None if pace.speed is None else dict([pace.speed]),
        "eta_seconds": _eta(pace, now) if state.word == "running" else None,
        "starts": state.starts,
        "job": state.job,
        "executor": state.executor,
        "attempts": len(all_histories(events)),
        "restarts": restarts_by_cause(events),
        # If only the end of a long event log was read, attempts and restarts may be missing.
        "whole_history": log.whole,
        "progress_seconds": _since(pace.latest or _last_output(run_directory, events), now),
        "age_seconds": round(now - (log.began or now)),
        "goodput": _goodput(run_directory, log, now),
        "detail": state.detail,
        "diagnosis": diagnosis_of(run_directory, events) if failed and diagnose else None,
        "directory": str(run_directory.path),
    }


def diagnosis_of(run_directory: RunDirectory, events: Sequence[Event]) -> str | None:
    """Return the cause of the newest attempt's failure in one line, from its logs; None if unknown."""
    attempt = attempt_to_diagnose(events)
    if attempt is None:
        return None
    lines = lines_of_attempt(
        run_directory, attempt, events, head=_HEAD, tail=_TAIL, most_files=_MOST_FILES
    )
    try:
        found = find_cause(lines, nodes_of(events, attempt))
    except OSError:
        return None
    return found.line if found and found.confidence != "low" else None


def _all_events(run: RunDirectory) -> Recent:
    events = read_events(run)
    return Recent(events, True, events[0].time if events else None)


def _pace(run: RunDirectory, events: Sequence[Event]) -> PaceFacts:
    pace = pace_of(run)
    return pace if pace.latest or pace.step else replace(pace, step=_reported_step(run, events))


def _eta(pace: PaceFacts, now: float) -> int | None:
    left = pace.left(now)
    return None if left is None else round(left)


def _goodput(run: RunDirectory, log: Recent, now: float) -> dict[str, Any]:
    """Return the breakdown of the run's time; from the result if only the end of the event log was read."""
    if not log.whole:
        kept = (read_json(run.result) or {}).get("goodput")
        return kept if isinstance(kept, dict) else goodput((), now).as_record()
    return goodput(log.events, now).as_record()


def _saved_step(run: RunDirectory, events: Sequence[Event]) -> int | None:
    """Return the step from which a resume starts, or None; for a script, its last reported save."""
    kept = of_script(events) or has_commit(run)
    return last_committed(events) if kept else None


def _reported_step(run_directory: RunDirectory, events: Sequence[Event]) -> int | None:
    """Return the step that a script has reported in its newest attempt with a report."""
    for record in reversed(all_histories(events)):
        try:
            logs = run_directory.attempt_logs(record.attempt.job, record.attempt.restart)
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
        return last_output(run.attempt_logs(opened[-1].job, opened[-1].restart))
    return None


def _since(when: float | None, now: float) -> int | None:
    known = when is not None and math.isfinite(when)
    return round(max(0.0, now - when)) if known and when is not None else None
