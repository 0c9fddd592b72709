"""Progress lines of training: the loss of a step, and the report of a finished run.

Rank 0's log contains these lines, and the commands that follow a run print them.
"""

import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from hpcrun.printing import escaped, quoted
from hpcrun.run.directory import RunDirectory
from hpcrun.run.io.files import read_json

# Frequent lines would only make a log file or a pipe longer.
_SECONDS_PER_LINE = 10.0


class Pace:
    """Estimates the remaining time from the times in the run's files.

    The time of reading is no measure, because a reader may get many lines together.
    """

    def __init__(self, total: int) -> None:
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
        if step <= first or when < began:
            return None
        return str(tqdm.format_interval((when - began) / (step - first) * (self._total - step)))


class StepLines:
    """Lines at the start, at the end, and at most every ten seconds of training over ``total`` steps."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._pace = Pace(total)
        self._printed: float | None = None

    def begin(self, step: int, when: float) -> None:
        """Start the clock at ``step``; ``when``: Unix seconds."""
        self._pace.begin(step, when)
        self._printed = None

    def line(self, step: int, when: float, facts: Mapping[str, str]) -> str | None:
        """Return the line for ``step`` done steps at ``when`` (Unix seconds); None between two lines."""
        now = time.monotonic()
        due = self._printed is None or now - self._printed >= _SECONDS_PER_LINE
        if not facts or (not due and step < self._total):
            return None
        self._printed = now
        return f"step {step}/{self._total}: {in_words(facts, self._pace.left(step, when))}"


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
    if "validation_loss" not in report and result.get("validation_loss") is not None:
        loss = (
            result["best"]["validation_loss"] if _of_the_best(result) else result["validation_loss"]
        )
        short["validation_loss"] = _shown(loss)
    if "stopped_early" in result:
        short["stopped_early"] = _shown(result["stopped_early"])
    if _best_is_not_last(result):
        best = result["best"]
        mine, others = (
            ("; the figures above are of this step", "")
            if _of_the_best(result)
            else ("", "; the figures above are of this step")
        )
        short["best"] = (
            f"step {best['step']}, validation loss {_shown(best['validation_loss'])}{mine}"
        )
        short["last"] = (
            f"step {result['steps']}, validation loss {_shown(result['validation_loss'])}{others}"
        )
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


def _best_is_not_last(result: dict[str, Any]) -> bool:
    """Return True if a step before the last had the lowest validation loss."""
    return "best" in result and result["best"]["step"] != result.get("steps")


def _of_the_best(result: dict[str, Any]) -> bool:
    """Return True if the report is of the step with the lowest validation loss, not of the last step."""
    return (
        _best_is_not_last(result) and result.get("report_step", result["steps"]) != result["steps"]
    )


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
