"""The event log: the events of a run in order, with causes. Restart decisions read only this file.

Rank 0's log contains these lines, and the commands that follow a run print them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hpcrun.printing import escaped, quoted, say_aside
from hpcrun.run.attempt import Attempt as Attempt
from hpcrun.run.attempt import numbers_of
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import (
    append_line,
    read_json,
    read_lines,
)


class Cause(str, Enum):
    """The cause of an attempt's end."""

    FINISHED = "finished"
    PREEMPTION = "preemption"
    TIME_LIMIT = "time-limit"
    CONTINUED = "continued"
    NODE_FAILURE = "node-failure"
    CRASH = "crash"
    HANG = "hang"
    CANCELLED = "cancelled"
    BAD_INPUT = "bad-input"
    SAVE_FAILED = "save-failed"
    EXHAUSTED = "exhausted"


@dataclass(frozen=True)
class Event:
    """A line of the log; ``time`` is in Unix seconds.

    Values of ``what``: submitted (by a person), opened and started (an attempt), stepped (a script has
    reported its first step), saved (``found``: reported later because of a crash), save-failed, stopped (at
    an agreed step), nonfinite (gradients at a step), suspended (by Slurm, for ``seconds``; reported when it
    continues), slow (a node, see
    ``slow_nodes.py``), slow-over, trained (all steps are done), bad-input, refused, finished, ended (with
    its cause), requeue-failed, excluded (nodes that failed too often), node-lost (``host``, with the
    ``reason``), replaced (``lost`` ``by`` a spare node, with the ``reason``), spare-lost and spare-unfit
    (a node that no step used), cancelled (by a person, on Slurm), pruned (by a search: the job is cancelled
    next), preempted (by a person), copies (of a script did the same work, see ``reason``), occupied
    (another job was ``refused`` because the ``holder`` had the run), given-up (no job continues the run).
    """

    what: str
    time: float
    attempt: Attempt | None
    cause: str | None
    step: int | None
    fields: dict[str, Any]


def record_event(
    run: RunDirectory,
    what: str,
    *,
    attempt: Attempt | None = None,
    cause: str | None = None,
    step: int | None = None,
    **fields: Any,
) -> None:
    """Append an event durably. Never call this in a signal handler.

    Raises:
        OSError: the disk refused.
    """
    line: dict[str, Any] = {"time": round(time.time(), 3), "event": what}
    if attempt is not None:
        line |= numbers_of(attempt)
    if cause is not None:
        line["cause"] = cause
    if step is not None:
        line["step"] = step
    append_line(run.events, line | fields, durable=True)


def note(run: RunDirectory, what: str, attempt: Attempt, **fields: Any) -> None:
    """Append as :func:`record_event`; on a full disk, report the loss of the event and continue."""
    try:
        record_event(run, what, attempt=attempt, **fields)
    except OSError as error:
        say_aside(f"hpcrun: event {what} is not written: {error}")


def read_events(run: RunDirectory) -> Sequence[Event]:
    """Return all valid events of the run, in the order of writing; damaged lines are skipped."""
    events = (to_event(line) for line in read_lines(run.events))
    return [event for event in events if event is not None]


def was_cancelled(events: Sequence[Event], job: str) -> bool:
    """Return True if the job was cancelled since it was submitted and last opened the run."""
    kinds = [
        event.what
        for event in events
        if event.attempt is not None and event.attempt.job == job
        if event.what in ("submitted", "opened", "cancelled", "cancel-failed")
    ]
    return kinds[-1:] == ["cancelled"]


PRUNED = "a search ended it early; `hpcrun resume` continues it"


def was_pruned(events: Sequence[Event]) -> bool:
    """Return True if a search pruned the run since its newest submission."""
    kinds = [event.what for event in events if event.what in ("submitted", "pruned")]
    return kinds[-1:] == ["pruned"]


def job_of_process(run: RunDirectory, pid: int) -> str:
    """Return a name for the job of an attempt without a scheduler, such as ``pid1234``.

    A second attempt in the same process is ``pid1234-2``, because an old name would bring back the failures
    of the earlier attempt. Process ids also repeat, in every container.
    """
    opened = {
        event.attempt.job for event in read_events(run) if event.what == "opened" and event.attempt
    }
    names = (f"pid{pid}" if number == 1 else f"pid{pid}-{number}" for number in count(1))
    return next(name for name in names if name not in opened and not run.job_logs(name).exists())


def to_event(line: dict[str, Any]) -> Event | None:
    """Return the event of a log line, or None if a value has the wrong type."""
    known = {"time", "event", "job", "restart", "cause", "step"}
    cause, step = line.get("cause"), line.get("step")
    if not isinstance(cause, str | None) or not isinstance(step, int | None):
        return None
    try:
        return Event(
            what=str(line["event"]),
            time=float(line.get("time", 0.0)),
            attempt=Attempt(
                str(line["job"]), int(line.get("restart", 0)), int(line.get("in_place", 0))
            )
            if "job" in line
            else None,
            cause=cause,
            step=step,
            fields={key: value for key, value in line.items() if key not in known},
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


class EventCache:
    """The event logs of many runs, each read once.

    Args:
        before: the result of an earlier read; a log of unchanged length is not read again.
    """

    def __init__(self, before: "EventCache | None" = None) -> None:
        self._old = {} if before is None else before._read
        self._read: dict[Path, tuple[tuple[int, int, int] | None, Sequence[Event]]] = {}

    def __call__(self, run: RunDirectory) -> Sequence[Event]:
        """Return the events of ``run``, oldest first; raises OSError if they cannot be read."""
        if run.path not in self._read:
            mark = signature(run.events)
            old = self._old.get(run.path)
            if old is None or mark is None or old[0] != mark:
                found = map(to_event, read_lines(run.events))
                old = mark, [event for event in found if event is not None]
            self._read[run.path] = old
        return self._read[run.path][1]


def signature(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with each line appended to the file; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


Reader = Callable[[RunDirectory], Sequence[Event]]
"""Returns the events of a run, as ``read_events`` does."""


# Frequent lines would only make a log file or a pipe longer.
_SECONDS_PER_LINE = 10.0


class Pace:
    """Estimates the remaining time from the times in the run's files.

    The time of reading is no measure, because a reader may get many lines together.
    """

    def __init__(self, total: int | None) -> None:
        """``total``: the steps of the run; None: unknown, as those of a script."""
        self._total = total
        self._first: tuple[int, float] | None = None
        self._warm = False

    def begin(self, step: int, when: float) -> None:
        """Start at ``step``; the pace of an earlier attempt does not count."""
        self._first, self._warm = (step, when), False

    def left(self, step: int, when: float) -> str | None:
        """Return the remaining time after ``step`` in words, or None if it is unknown."""
        if self._first is None:
            self._first = step, when
            return None
        first, began = self._first
        if not self._warm:
            # The first steps compile and warm up: later estimates exclude their time.
            self._first, self._warm = (step, when), True
        if self._total is None or step <= first or when < began:
            return None
        return str(tqdm.format_interval((when - began) / (step - first) * (self._total - step)))


class StepLines:
    """Lines at the start, at the end, and at most every ten seconds of training over ``total`` steps.

    Without ``total`` (None) no line is the last one.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._pace = Pace(total)
        self._printed: float | None = None

    def begin(self, step: int, when: float) -> None:
        """Start the clock at ``step``; ``when``: Unix seconds."""
        self._pace.begin(step, when)
        self._printed = None

    def due(self, step: int) -> bool:
        """Return True if it is time for a line after ``step`` steps."""
        if self._printed is None or (self._total is not None and step >= self._total):
            return True
        return time.monotonic() - self._printed >= _SECONDS_PER_LINE

    def line(self, step: int, when: float, facts: Mapping[str, str]) -> str | None:
        """Return the line for ``step`` done steps at ``when`` (Unix seconds); None between two lines."""
        if not facts or not self.due(step):
            return None
        self._printed = time.monotonic()
        done = f"{step}" if self._total is None else f"{step}/{self._total}"
        return f"step {done}: {in_words(facts, self._pace.left(step, when))}"


def in_words(facts: Mapping[str, str], left: str | None) -> str:
    """Return ``facts`` and the remaining time on one line, safe for a terminal."""
    words = [f"{key} {value}" for key, value in facts.items()]
    return escaped(", ".join([*words, f"ETA {left}"] if left else words))


def facts_of(line: Mapping[str, Any]) -> dict[str, str]:
    """Return loss and speed, in words, of a line of metrics.jsonl."""
    facts: dict[str, str] = {}
    for key, value in line.items():
        if key == "loss":
            facts["loss"] = shown_loss(value)
        elif key.endswith("_per_second") and isinstance(value, int | float):
            facts[f"{key.removesuffix('_per_second')}/s"] = f"{value:,.0f}"
    return facts


def validation_line(line: Mapping[str, Any]) -> str | None:
    """Return the text for a validation in a line of metrics.jsonl; None if the line has none."""
    if "validation_loss" not in line:
        return None
    return f"step {line['step']}: validation loss {shown_loss(line['validation_loss'])}"


def shown_loss(value: Any) -> str:
    """Return a loss as text. The file has null for a number that is not finite, as JSON has none."""
    return f"{value:.4f}" if isinstance(value, int | float) else "nan"


def result_lines(run: RunDirectory) -> list[str]:
    """Return a finished run's report: numbers first, then texts of several lines."""
    result = read_json(run.result) or {}
    report = {key: _shown(value) for key, value in (result.get("report") or {}).items()}
    long = {key: value for key, value in report.items() if "\n" in value}
    short = {escaped(key): value for key, value in report.items() if key not in long}
    # The report is of the last step, or of the step with the lowest validation loss.
    losses = {result.get("steps"): result.get("validation_loss")}
    reported = result.get("report_step", result.get("steps"))
    if "best" in result:
        if reported != result.get("steps"):
            reported = result["best"]["step"]  # the report's own step may have the same loss
        losses = {result["best"]["step"]: result["best"]["validation_loss"]} | losses
    if "validation_loss" not in report and losses.get(reported) is not None:
        short["validation_loss"] = _shown(losses[reported])
    if "stopped_early" in result:
        short["stopped_early"] = _shown(result["stopped_early"])
    if len(losses) > 1:
        for name, step in zip(("best", "last"), losses, strict=True):
            above = "; the figures above are of this step" if step == reported else ""
            short[name] = f"step {step}, validation loss {_shown(losses[step])}{above}"
    if isinstance(result.get("programs"), int) and result["programs"] > 1:
        # A script may start its own ranks (mp.spawn) in a way that its command does not show.
        short["programs"] = f"{result['programs']} were started, each with its own RANK"
    if "report_error" in result:
        short["report"] = result["report_error"]
    width = max(map(len, short), default=0)
    lines = [f"  {key.replace('_', ' '):<{width}}  {value}" for key, value in short.items()]
    for key, value in long.items():
        lines.append(f"  {key.replace('_', ' ')}:")
        lines += quoted(value)
    return [*lines, f"  {'result':<{width}}  {run.result}"]


def _shown(value: Any) -> str:
    """Return a value of the report as text: a list of lists becomes a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list) and len(value) > 1 and all(isinstance(row, list) for row in value):
        cells = [[_shown(cell) for cell in row] for row in value]
        width = max((len(cell) for row in cells for cell in row), default=0)
        return "\n".join(" ".join(cell.rjust(width) for cell in row) for row in cells)
    return str(value)
