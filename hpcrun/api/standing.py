"""The state of a run, as `hpcrun status --json` prints it."""

import math
import time
from collections.abc import Sequence
from typing import Any

from hpcrun.api.log_files import last_attempt
from hpcrun.diagnose.finding import find_cause
from hpcrun.diagnose.run_lines import lines_of_attempt, nodes_of
from hpcrun.launch.jobs import RunState
from hpcrun.lifecycle.goodput import goodput
from hpcrun.lifecycle.history import all_lives, last_committed, of_script
from hpcrun.run.commits import newest_commit
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Event, read_events
from hpcrun.run.io.files import read_lines
from hpcrun.run.reports import published

# Bytes of each log: many runs are shown together. `hpcrun doctor` reads more.
_HEAD, _TAIL, _MOST_FILES = 1 << 14, 1 << 16, 64


def row_of(run_directory: RunDirectory, state: RunState) -> dict[str, Any]:
    """Return the facts about a run in ``state``: plain data, without an answer None."""
    events = read_events(run_directory)
    lines = read_lines(run_directory.metrics)
    last = lines[-1:]
    losses = [line["loss"] for line in reversed(lines) if "loss" in line][:1]
    now = time.time()
    begun = events[0].time if events else now
    latest = last[0].get("time") if last else None
    return {
        "name": run_directory.name,
        "state": state.word,
        "step": last[0].get("step") if last else _reported_step(run_directory, events),
        "committed": _saved_step(run_directory, events),
        # A loss that is not finite is null in the file, and here again with --json.
        "loss": (math.nan if losses[0] is None else losses[0]) if losses else None,
        "job": state.job,
        "executor": state.executor,
        "attempts": len(all_lives(events)),
        "progress_seconds": _since(latest, now),
        "age_seconds": round(now - begun),
        "goodput": goodput(events, now).as_record(),
        "detail": state.detail,
        "verdict": _verdict(run_directory, events) if state.word == "failed" else None,
        "directory": str(run_directory.path),
    }


def _saved_step(run: RunDirectory, events: Sequence[Event]) -> int | None:
    """The step that a resume starts from, or None. A script keeps its files elsewhere: its report counts."""
    kept = of_script(events) or newest_commit(run) is not None
    return last_committed(events) if kept else None


def _reported_step(run_directory: RunDirectory, events: Sequence[Event]) -> int | None:
    """The step that a script has reported in its newest attempt with a report."""
    for life in reversed(all_lives(events)):
        try:
            logs = run_directory.attempt_logs(life.attempt.job, life.attempt.restart)
            step = published(logs).step
        except OSError:
            continue
        if step is not None:
            return step
    return None


def _verdict(run_directory: RunDirectory, events: Sequence[Event]) -> str | None:
    """The doctor's verdict on the newest attempt; None where the logs show no cause."""
    attempt = last_attempt(run_directory)
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


def _since(when: Any, now: float) -> int | None:
    known = isinstance(when, int | float) and math.isfinite(when)
    return round(max(0.0, now - when)) if known else None
