"""The state of a run, as `hpcrun status --json` prints it."""

import contextlib
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcrun.api.state_words import restarts_by_cause, restarts_in_place, state_in_words
from hpcrun.checkpoint.storage.manifest import has_commit
from hpcrun.diagnose.finding import find_cause
from hpcrun.diagnose.run_lines import attempt_to_diagnose, lines_of_attempt, nodes_of
from hpcrun.job.history import all_histories, goodput, last_committed, of_script
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import last_output
from hpcrun.run.events import Event, read_events
from hpcrun.run.files import open_regular, read_lines
from hpcrun.run.reports import published
from hpcrun.run.slow_nodes import replaced_now, slow_now
from hpcrun.slurm.launch.jobs import RunState

# Bytes to read from the end of metrics.jsonl, about 30 lines, to compute the pace.
_METRICS_READ = 1 << 13
_CONFIG_READ = 1 << 16
# The resolved config has one key a line, and sections begin in the first column.
_STEPS = re.compile(r"^train:\n(?:[ #].*\n|\n)*?  steps: (\d+)$", re.M)
_COMMAND = re.compile(r"^command:(?! *(\[\]|null)$)", re.M)


@dataclass(frozen=True)
class PaceFacts:
    """Progress and speed from the last lines of metrics.jsonl.

    ``step``: steps done. ``total``: steps of the whole training. ``loss``: NaN where the file has null.
    ``speed``: the unit (``tokens``) and the number per second. ``latest``: the time of the last line (Unix
    seconds). ``seconds_per_step``: over the lines of one attempt, saves and validations included.
    """

    step: int | None = None
    total: int | None = None
    loss: float | None = None
    speed: tuple[str, float] | None = None
    latest: float | None = None
    seconds_per_step: float | None = None

    @property
    def percent(self) -> float | None:
        """Finished steps in percent of all steps."""
        if self.step is None or not self.total:
            return None
        return min(100.0, 100 * self.step / self.total)

    def left(self, now: float) -> int | None:
        """Return the whole seconds until the last step at the present pace; None if the pace is unknown."""
        if self.step is None or self.total is None:
            return None
        if self.seconds_per_step is None or self.latest is None:
            return None
        ahead = (self.total - self.step) * self.seconds_per_step
        return round(max(0.0, ahead - max(0.0, now - self.latest)))


def facts(lines: Sequence[dict[str, Any]], total: int | None) -> PaceFacts:
    """Return the facts in ``lines`` of metrics.jsonl, oldest first."""
    if not lines:
        return PaceFacts(total=total)
    last = lines[-1]
    losses = [line["loss"] for line in reversed(lines) if "loss" in line][:1]
    step = last.get("step")
    loss = losses[0] if losses else None
    return PaceFacts(
        step=step if isinstance(step, int) else None,
        total=total,
        # A loss that is not finite is null in the file.
        loss=(math.nan if losses else None) if loss is None else _number(loss),
        speed=_speed(lines),
        # The line of a validation has no time.
        latest=next(
            (when for line in reversed(lines) if (when := _number(line.get("time")))), None
        ),
        seconds_per_step=_seconds_per_step(lines),
    )


def total_steps(run: RunDirectory) -> int | None:
    """Return ``train.steps`` of the resolved config; None for a script, or if the file cannot be read.

    Reading the text costs a hundredth of parsing the YAML, and there may be thousands of runs.
    """
    try:
        with open_regular(run.config) as stream:
            text = stream.read(_CONFIG_READ).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = None if _COMMAND.search(text) else _STEPS.search(text)
    return int(found[1]) if found else None


def _speed(lines: Sequence[dict[str, Any]]) -> tuple[str, float] | None:
    for line in reversed(lines):
        for key, value in line.items():
            number = _number(value)
            if key.endswith("_per_second") and number is not None:
                return key.removesuffix("_per_second"), number
    return None


def _seconds_per_step(lines: Sequence[dict[str, Any]]) -> float | None:
    """Return the pace over the lines of the last attempt, or None if fewer than two lines have one."""
    attempt = _attempt_of(lines[-1])
    oldest, newest = _point(lines, attempt), _point(reversed(lines), attempt)
    if oldest is None or newest is None:
        return None
    (first, began), (last, ended) = oldest, newest
    return (ended - began) / (last - first) if last > first and ended >= began else None


def _attempt_of(line: Mapping[str, Any]) -> tuple[Any, Any]:
    return line.get("restart"), line.get("in_place", 0)


def _point(lines: Iterable[dict[str, Any]], attempt: tuple[Any, Any]) -> tuple[int, float] | None:
    """Return step and time of the first of the attempt's ``lines`` with both."""
    for line in lines:
        step, when = line.get("step"), _number(line.get("time"))
        if _attempt_of(line) == attempt and isinstance(step, int) and when is not None:
            return step, when
    return None


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and math.isfinite(value) else None


# Bytes read from each log, because many runs are shown together. `hpcrun doctor` reads more.
_HEAD, _TAIL, _MOST_FILES = 1 << 14, 1 << 16, 64


def row_of(
    run_directory: RunDirectory,
    state: RunState,
    events: Sequence[Event] | None = None,
    *,
    diagnose: bool = True,
) -> dict[str, Any]:
    """Return the facts about a run in ``state`` as plain data; an unknown value is None.

    Args:
        events: the events, if they have been read.
        diagnose: look for the cause of a failure in the logs.

    Raises:
        OSError: the files of the run cannot be read.
    """
    events, now = read_events(run_directory) if events is None else events, time.time()
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
        "eta_seconds": pace.left(now) if state.word == "running" else None,
        "starts": state.starts,
        "job": state.job,
        "executor": state.executor,
        "attempts": len(all_histories(events)),
        "restarts": restarts_by_cause(events),
        "in_place": restarts_in_place(events),
        "progress_seconds": _since(pace.latest or _last_output(run_directory, events), now),
        "age_seconds": round(now - events[0].time) if events else 0,
        "goodput": goodput(events, now).as_record(),
        "detail": state.detail,
        "slow": [one.line for one in slow_now(events)] if state.word == "running" else [],
        "replaced": replaced_now(events) if state.word == "running" else [],
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


def _pace(run: RunDirectory, events: Sequence[Event]) -> PaceFacts:
    pace = facts(read_lines(run.metrics, _METRICS_READ), total_steps(run))
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


def _since(when: float | None, now: float) -> int | None:
    known = when is not None and math.isfinite(when)
    return round(max(0.0, now - when)) if known and when is not None else None
