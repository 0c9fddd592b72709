"""Progress of a script, as the script reports it: its step, its newest saved step, and its metrics.

The script writes a small file on its node, which takes microseconds. The rank's process, which started the
script, reads this file and publishes it in the run directory. Metrics go to metrics.jsonl directly. Standard
library only.
"""

import contextlib
import json
import operator
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex

from hpcrun.printing import say_aside
from hpcrun.run.attempt import attempt_here, number_columns
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import append_line, read_json, write_json

VARIABLE = "HPCRUN_REPORTS"
"""Environment variable with the folder of a rank's reports."""

# hpcrun writes these columns of metrics.jsonl.
_RESERVED = ("time", "restart", "in_place")


@dataclass(frozen=True)
class ScriptProgress:
    """Progress of a script: newest reported ``step``, newest ``saved`` step.

    ``saved_at``: time of the report of ``saved``, in Unix seconds. ``done``: the work is finished.
    ``first``: the first reported step.
    """

    step: int | None = None
    saved: int | None = None
    saved_at: float | None = None
    done: bool = False
    first: int | None = None

    def with_news(self, other: "ScriptProgress") -> "ScriptProgress":
        """Return the newer of both values, for each field."""
        newer = self if _not_older(self.saved, other.saved) else other
        step = self.step if _not_older(self.step, other.step) else other.step
        first = other.first if self.first is None else self.first
        return ScriptProgress(step, newer.saved, newer.saved_at, self.done or other.done, first)


def report(
    step: int | None = None,
    *,
    saved: int | bool | None = None,
    done: bool = False,
    **metrics: SupportsFloat,
) -> None:
    """Report the progress of this script to hpcrun; do nothing in a script that hpcrun did not start.

    ``hpcrun status`` shows both numbers. The budgets ``restarts.no_progress`` and ``restarts.same_step``
    count them as for a task. All ranks may call this function; the progress of rank 0 counts. On a full disk
    the report is lost, and training continues.

    Args:
        step: number of finished steps since the beginning of training.
        saved: True if the checkpoint of ``step`` is written, or the step of the newest checkpoint.
        done: True if the work is finished: rank 0 reports it at its end. Without this report, exit code 0
            after a signal to stop has the meaning of ``job.zero_after_signal``.
        metrics: numbers of this step, such as ``loss=0.5``: one line of the run's metrics.jsonl, which only
            rank 0 writes. A tensor of one element is a number. NaN and infinity become null.

    Raises:
        TypeError: a step is not an integer, or a metric is not a number.
        ValueError: a step is negative, ``saved`` is True or there are metrics without a ``step``, or a
            metric is named ``time``, ``restart`` or ``in_place``.
    """
    folder = os.environ.get(VARIABLE)
    steps = None if step is None else _step(step)
    if steps is None and (saved is True or metrics):
        raise ValueError("hpcrun.report needs step=, the step of the save or of the metrics")
    kept = steps if saved is True else None if saved is None or saved is False else _step(saved)
    values = {name: _number(name, value) for name, value in metrics.items()}
    if folder:
        _REPORTER.write(
            Path(folder),
            ScriptProgress(steps, kept, None if kept is None else time.time(), done, steps),
        )
        if values and os.environ.get("RANK", "0") == "0":
            attempt = attempt_here("", os.environ)
            _REPORTER.append(
                {"step": steps, "time": round(time.time(), 3), **number_columns(attempt)} | values
            )


class _Reporter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._newest = ScriptProgress()
        self._complained = False

    def write(self, folder: Path, news: ScriptProgress) -> None:
        """Replace the report of this process by a report with ``news``."""
        with self._lock:
            before = self._newest if folder == self._folder else ScriptProgress()
            self._folder, self._newest = folder, before.with_news(news)
            name = f"report-{os.getpid()}.json"
            temporary = folder / f".{name}"
            try:
                temporary.write_text(json.dumps(asdict(self._newest)))
                # No fsync: the reader is on the same node.
                temporary.replace(folder / name)
            except OSError as error:
                self._complain(error)

    def append(self, line: dict[str, Any]) -> None:
        """Append ``line`` to the metrics of the run."""
        try:
            append_line(RunDirectory(Path(os.environ["HPCRUN_RUN"])).metrics, line)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            say_aside(f"hpcrun: the report is not written: {error}")
        self._complained = True


_REPORTER = _Reporter()


def newest_report(folder: Path) -> ScriptProgress:
    """Return the newest progress that a rank's processes have reported into ``folder``."""
    found = ScriptProgress()
    for path in folder.glob("report-*.json"):
        with contextlib.suppress(OSError):
            found = found.with_news(_progress(read_json(path)))
    return found


def publish(attempt_logs: Path, progress: ScriptProgress) -> None:
    """Replace the attempt's ``progress.json``; raises OSError when the disk refuses."""
    write_json(attempt_logs / "progress.json", asdict(progress))


def published(attempt_logs: Path) -> ScriptProgress:
    """Return the progress that an attempt's ranks have published; raises OSError as ``read_json`` does."""
    return _progress(read_json(attempt_logs / "progress.json"))


def _progress(value: dict[str, object] | None) -> ScriptProgress:
    """Return the progress in a file; a value that is not a number counts as missing."""
    value = value or {}
    step, saved, saved_at, first = (
        value.get(key) for key in ("step", "saved", "saved_at", "first")
    )
    return ScriptProgress(
        step if isinstance(step, int) else None,
        saved if isinstance(saved, int) else None,
        saved_at if isinstance(saved_at, int | float) else None,
        value.get("done") is True,
        first if isinstance(first, int) else None,
    )


def _step(value: SupportsIndex) -> int:
    number = operator.index(value)
    if not 0 <= number < 2**63:
        raise ValueError(f"hpcrun.report: step {number} is negative, or too large")
    return number


def _number(name: str, value: SupportsFloat) -> float:
    if name in _RESERVED:
        raise ValueError(f"hpcrun.report: {name} is a column of hpcrun; choose another name")
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    if not hasattr(value, "__float__"):
        raise TypeError(f"hpcrun.report: {name}={value!r:.60} is not a number")
    try:
        return float(value)
    except (OverflowError, ValueError, RuntimeError, TypeError) as error:
        raise TypeError(f"hpcrun.report: {name} is not one number: {error}") from error


def _not_older(mine: int | None, other: int | None) -> bool:
    return other is None or (mine is not None and mine >= other)


_NAME = "preflight.json"


@dataclass(frozen=True)
class PreflightFailure:
    """Failure of a preflight: its first ``cause`` as a line, and the ``nodes`` to exclude."""

    cause: str
    nodes: tuple[str, ...]


def record_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write a preflight's report into an attempt's logs; raises OSError when the disk refuses."""
    write_json(folder / _NAME, report)


def read_unfit(folder: Path) -> PreflightFailure | None:
    """Return the failure of an attempt's preflight; None if it passed, or there was no preflight.

    Raises:
        OSError: the report exists but cannot be read.
    """
    report = read_json(folder / _NAME)
    if report is None or not report.get("cause"):
        return None
    return PreflightFailure(str(report["cause"]), tuple(map(str, report.get("unfit") or ())))
