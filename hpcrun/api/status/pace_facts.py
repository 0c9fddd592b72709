"""The progress of a run in numbers, from the end of its metrics: step, loss, speed, remaining time."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hpcrun.run.directory import RunDirectory
from hpcrun.run.io.files import open_regular
from hpcrun.run.last_lines import last_lines

METRICS_READ = 1 << 13
"""Bytes to read from the end of metrics.jsonl, about 30 lines, to compute the pace."""

_CONFIG_READ = 1 << 16
# The resolved config has one key a line, and sections begin in the first column.
_SECTION = re.compile(r"^train:\n((?:[ #].*\n|\n)*)", re.M)
_STEPS = re.compile(r"^  steps: (\d+)$", re.M)


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

    def left(self, now: float) -> float | None:
        """Return the seconds until the last step at the present pace; None if the pace is unknown."""
        if self.step is None or self.total is None:
            return None
        if self.seconds_per_step is None or self.latest is None:
            return None
        ahead = (self.total - self.step) * self.seconds_per_step
        return max(0.0, ahead - max(0.0, now - self.latest))


def pace_of(run: RunDirectory) -> PaceFacts:
    """Return the facts of ``run``; raises OSError if its files cannot be read."""
    return facts(last_lines(run.metrics, METRICS_READ).values, total_steps(run))


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
            text = stream.read(_CONFIG_READ)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _steps_in(text)


@lru_cache(maxsize=256)
def _steps_in(raw: bytes) -> int | None:
    """Return ``train.steps`` from a config's text without parsing the YAML."""
    text = raw.decode(errors="replace")
    section = None if _has_command(text) else _SECTION.search(text)
    found = section and _STEPS.search(section[1])
    return int(found[1]) if found else None


def _has_command(text: str) -> bool:
    found = re.search(r"^command:(.*)\n(- )?", text, re.M)
    return bool(found and (found[2] or found[1].strip() not in ("", "[]", "null")))


def _speed(lines: Sequence[dict[str, Any]]) -> tuple[str, float] | None:
    for line in reversed(lines):
        for key, value in line.items():
            number = _number(value)
            if key.endswith("_per_second") and number is not None:
                return key.removesuffix("_per_second"), number
    return None


def _seconds_per_step(lines: Sequence[dict[str, Any]]) -> float | None:
    """Return the pace over the lines of the last attempt, or None if fewer than two lines have one."""
    restart = lines[-1].get("restart")
    oldest, newest = _point(lines, restart), _point(reversed(lines), restart)
    if oldest is None or newest is None:
        return None
    (first, began), (last, ended) = oldest, newest
    return (ended - began) / (last - first) if last > first and ended >= began else None


def _point(lines: Iterable[dict[str, Any]], restart: Any) -> tuple[int, float] | None:
    """Return step and time of the first of ``lines`` with both."""
    for line in lines:
        step, when = line.get("step"), _number(line.get("time"))
        if line.get("restart") == restart and isinstance(step, int) and when is not None:
            return step, when
    return None


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and math.isfinite(value) else None
