"""The progress of a run from the end of its metrics.jsonl: step, speed, remaining time, and a stall."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import open_regular

METRICS_READ = 1 << 13
"""Bytes to read from the end of metrics.jsonl, about 30 lines, to compute the pace."""
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
    ``longest``: the longest time between two lines of that attempt.
    """

    step: int | None = None
    total: int | None = None
    loss: float | None = None
    speed: tuple[str, float] | None = None
    latest: float | None = None
    seconds_per_step: float | None = None
    longest: float | None = None

    @property
    def percent(self) -> float | None:
        """Finished steps in percent of all steps."""
        if self.step is None or not self.total:
            return None
        return min(100.0, 100 * self.step / self.total)

    def left(self, age: float) -> int | None:
        """Return the whole seconds until the last step at the present pace; None without a pace or progress.

        Args:
            age: seconds since the last line.
        """
        if self.step is None or self.total is None or self.seconds_per_step is None:
            return None
        if self.longest is None or age > max(_LATE, _GAPS * self.longest):
            return None
        return round(max(0.0, (self.total - self.step) * self.seconds_per_step - age))

    def stalled(self, age: float) -> bool:
        """Return True if the next line is overdue, ``age`` seconds after the last line."""
        return self.longest is not None and age > max(_STALL, _GAPS * self.longest)


# Seconds. A validation, a save or a busy file server may delay a line.
_LATE, _STALL = 15.0, 60.0
_GAPS = 3.0


def facts(lines: Sequence[Mapping[str, object]], total: int | None) -> PaceFacts:
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
        longest=_longest(lines),
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


def _speed(lines: Sequence[Mapping[str, object]]) -> tuple[str, float] | None:
    for line in reversed(lines):
        for key, value in line.items():
            number = _number(value)
            if key.endswith("_per_second") and number is not None:
                return key.removesuffix("_per_second"), number
    return None


def _seconds_per_step(lines: Sequence[Mapping[str, object]]) -> float | None:
    """Return the pace over the lines of the last attempt, or None if fewer than two lines have one."""
    attempt = _attempt_of(lines[-1])
    points = [point for line in lines if (point := _point(line, attempt))]
    gaps = [
        (later[1] - earlier[1], later[0] - earlier[0])
        for earlier, later in pairwise(points)
        if later[0] > earlier[0] and later[1] >= earlier[1]
    ]
    if not gaps:
        return None
    # A stall is no part of the pace.
    usual = median(seconds for seconds, _ in gaps)
    kept = [gap for gap in gaps if gap[0] <= max(_STALL, _GAPS * usual)] or gaps
    return sum(seconds for seconds, _ in kept) / sum(steps for _, steps in kept)


def _longest(lines: Sequence[Mapping[str, object]]) -> float | None:
    """Return the longest time between two lines of the last attempt; None with fewer than two lines."""
    attempt = _attempt_of(lines[-1])
    times = [
        when
        for line in lines
        if _attempt_of(line) == attempt and (when := _number(line.get("time"))) is not None
    ]
    return max((later - earlier for earlier, later in pairwise(times)), default=None)


def _attempt_of(line: Mapping[str, object]) -> tuple[object, object]:
    return line.get("restart"), line.get("in_place", 0)


def _point(line: Mapping[str, object], attempt: tuple[object, object]) -> tuple[int, float] | None:
    """Return step and time of a line of ``attempt``; None if it lacks one of them."""
    step, when = line.get("step"), _number(line.get("time"))
    if _attempt_of(line) != attempt or not isinstance(step, int) or when is None:
        return None
    return step, when


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) else None
