"""How far a run is, on the screen: one bar on a terminal, a line now and then anywhere else."""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from hpcrun.printing import escaped, say

# In a log file or a pipe a line says as much as a hundred.
_SECONDS_PER_LINE = 10.0
# What a terminal echoes for Ctrl-C would push a full line over the edge, and leave half a bar behind.
_ECHO = 3


class Progress(Protocol):
    """What follows a run's steps."""

    def begin(self, step: int, when: float) -> None:
        """An attempt starts (again) at ``step``; ``when``: its own clock said so, in Unix seconds."""

    def update(self, step: int, when: float, facts: Mapping[str, str]) -> None:
        """``step`` steps were done at ``when``; ``facts``: loss and speed, in words."""

    def say(self, text: str) -> None:
        """A line of its own, where the bar does not hide it."""

    def close(self) -> None:
        """Leave the screen as it is."""


def progress(total: int, environ: Mapping[str, str] = os.environ) -> Progress:
    """A bar for a run of ``total`` steps where the terminal can move its cursor, else lines."""
    if sys.stderr.isatty() and environ.get("TERM", "dumb") != "dumb":
        return Bar(total, sys.stderr)
    return Lines(total)


class Pace:
    """The remaining time, from the times in the run's files.

    The time of reading is no measure: a reader may get many lines together.
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


class Bar:
    """A tqdm bar: share, step, loss, speed, and the time that is left."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total, self._stream = total, stream
        self._pace = Pace(total)
        self._bar: tqdm[Any] | None = None

    def begin(self, step: int, when: float) -> None:
        """Start the clock at ``step``."""
        self._pace.begin(step, when)
        self._open(step)

    def _open(self, step: int) -> "tqdm[Any]":
        self.close(leave=False)
        self._bar = tqdm(
            total=self._total,
            initial=step,
            file=self._stream,
            smoothing=0.1,
            ncols=self._columns(),
            bar_format="{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt}{postfix}",
        )
        return self._bar

    def update(self, step: int, when: float, facts: Mapping[str, str]) -> None:
        """Move the bar."""
        bar = self._open(0) if self._bar is None else self._bar
        bar.ncols = self._columns()
        if facts:
            bar.set_postfix_str(_in_words(facts, self._pace.left(step, when)), False)
        bar.update(step - bar.n)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._bar is None:
            say(text)
        else:
            self._bar.ncols = self._columns()
            with tqdm.external_write_mode(file=sys.stdout):
                say(text)

    def close(self, leave: bool = True) -> None:
        """Let go of the bar; ``leave`` it on the screen or not."""
        if self._bar is not None:
            self._bar.leave = leave
            self._bar.close()
            self._bar = None

    def _columns(self) -> int | None:
        try:
            return max(os.get_terminal_size(self._stream.fileno()).columns - _ECHO, 20)
        except OSError:
            return None


class Lines:
    """A plain line on standard output, at the start, at the end, and at most every ten seconds."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._pace = Pace(total)
        self._told: float | None = None

    def begin(self, step: int, when: float) -> None:
        """Start the clock at ``step``."""
        self._pace.begin(step, when)
        self._told = None

    def update(self, step: int, when: float, facts: Mapping[str, str]) -> None:
        """Print where it is, if it is time again."""
        now = time.monotonic()
        due = self._told is None or now - self._told >= _SECONDS_PER_LINE
        if not facts or (not due and step < self._total):
            return
        self._told = now
        say(f"step {step}/{self._total}: {_in_words(facts, self._pace.left(step, when))}")

    def say(self, text: str) -> None:
        """A line like any other."""
        say(text)

    def close(self) -> None:
        """Nothing is left open."""


def _in_words(facts: Mapping[str, str], left: str | None) -> str:
    words = [f"{key} {value}" for key, value in facts.items()]
    return escaped(", ".join([*words, f"ETA {left}"] if left else words))
