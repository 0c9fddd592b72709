"""The progress of a script, as the script itself reports it: its step, and the newest step that it saved.

The script writes a small file on its node, which costs microseconds. The rank's process, which started the
script, reads that file and publishes its content in the run directory. Standard library only.
"""

import contextlib
import json
import operator
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import SupportsIndex

from hpcrun.printing import say_aside
from hpcrun.run.io.files import read_json, write_json

VARIABLE = "HPCRUN_REPORTS"
"""The environment variable that names the folder of a rank's reports."""


@dataclass(frozen=True)
class Progress:
    """``step``: the newest step reported. ``saved``: the newest step with a written checkpoint.

    ``saved_at``: when that was reported, in Unix seconds.
    """

    step: int | None = None
    saved: int | None = None
    saved_at: float | None = None

    def covers(self, other: "Progress") -> bool:
        """Return True where ``other`` has nothing newer."""
        return _at_least(self.step, other.step) and _at_least(self.saved, other.saved)

    def with_news(self, other: "Progress") -> "Progress":
        """Return the newer of both, value by value."""
        newer = self if _at_least(self.saved, other.saved) else other
        step = self.step if _at_least(self.step, other.step) else other.step
        return Progress(step, newer.saved, newer.saved_at)


def report(step: int | None = None, *, saved: int | bool | None = None) -> None:
    """Report to hpcrun how far this script is; do nothing outside a script that hpcrun has started.

    ``hpcrun status`` shows both numbers, and the budgets ``restarts.no_progress`` and
    ``restarts.same_step`` count them as they count those of a task. Any rank may call it, all ranks, or
    one. A full disk costs the report, not the training.

    Args:
        step: the number of steps done, from the beginning of the training.
        saved: True where the checkpoint of ``step`` is written; or the step of the newest checkpoint.

    Raises:
        TypeError: a step is no integer.
        ValueError: a step is negative, or ``saved`` is True without a ``step``.
    """
    folder = os.environ.get(VARIABLE)
    done = None if step is None else _step(step)
    if saved is True and done is None:
        raise ValueError("hpcrun.report(saved=True) needs step=, the step that was saved")
    kept = done if saved is True else None if saved is None or saved is False else _step(saved)
    if folder:
        _REPORTER.write(Path(folder), Progress(done, kept, None if kept is None else time.time()))


class _Reporter:
    """Writes the reports of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._newest = Progress()
        self._complained = False

    def write(self, folder: Path, news: Progress) -> None:
        """Replace the report of this process by one with ``news``."""
        with self._lock:
            before = self._newest if folder == self._folder else Progress()
            self._folder, self._newest = folder, before.with_news(news)
            name = f"report-{os.getpid()}.json"
            temporary = folder / f".{name}"
            try:
                temporary.write_text(json.dumps(asdict(self._newest)))
                # No fsync: the reader is on the same node.
                temporary.replace(folder / name)
            except OSError as error:
                if not self._complained:
                    say_aside(f"hpcrun: the report is not written: {error}")
                self._complained = True


_REPORTER = _Reporter()


def newest_report(folder: Path) -> Progress:
    """Return what the processes of a rank have reported into ``folder`` until now."""
    found = Progress()
    for path in folder.glob("report-*.json"):
        with contextlib.suppress(OSError):
            found = found.with_news(_progress(read_json(path)))
    return found


def publish(attempt_logs: Path, progress: Progress) -> None:
    """Replace the attempt's ``progress.json``; raises OSError when the disk refuses."""
    write_json(attempt_logs / "progress.json", asdict(progress))


def published(attempt_logs: Path) -> Progress:
    """Return what the ranks of an attempt have published; raises OSError as ``read_json`` does."""
    return _progress(read_json(attempt_logs / "progress.json"))


def _progress(value: dict[str, object] | None) -> Progress:
    """Return the progress that a file holds; a value that is not a number counts as none."""
    step, saved, saved_at = ((value or {}).get(key) for key in ("step", "saved", "saved_at"))
    return Progress(
        step if isinstance(step, int) else None,
        saved if isinstance(saved, int) else None,
        saved_at if isinstance(saved_at, int | float) else None,
    )


def _step(value: SupportsIndex) -> int:
    number = operator.index(value)
    if number < 0:
        raise ValueError(f"hpcrun.report: step {number} is negative")
    return number


def _at_least(mine: int | None, other: int | None) -> bool:
    return other is None or (mine is not None and mine >= other)
