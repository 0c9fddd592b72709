"""The lines that show the progress and the result of a run.

Rank 0's log contains these lines, and the commands that follow a run print them.
"""

import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from hpcrun.printing import escaped, quoted
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json

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
