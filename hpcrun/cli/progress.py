"""The progress of a run on the screen: a bar on a terminal, or a line from time to time elsewhere."""

import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from hpcrun.printing import say
from hpcrun.run.progress_lines import Pace, StepLines, in_words

# The terminal's echo of Ctrl-C would push a full line over the edge and leave half a bar on the screen.
_ECHO = 3


class ProgressDisplay(Protocol):
    """A display of a run's steps."""

    def begin(self, step: int, when: float) -> None:
        """Start an attempt at ``step``; ``when``: Unix seconds by the attempt's clock."""

    def update(self, step: int, when: float, facts: Mapping[str, str]) -> None:
        """Show ``step`` steps done at ``when``; ``facts``: loss and speed, in words."""

    def say(self, text: str) -> None:
        """Print a separate line that the bar does not hide."""

    def close(self) -> None:
        """Finish; the screen keeps its content."""


def progress(total: int, environ: Mapping[str, str] = os.environ) -> ProgressDisplay:
    """Return a bar for a run of ``total`` steps if the terminal can move its cursor, else lines."""
    if sys.stderr.isatty() and environ.get("TERM", "dumb") != "dumb":
        return Bar(total, sys.stderr)
    return PlainLines(total)


class Bar:
    """A tqdm bar: share, step, loss, speed, and remaining time."""

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
            bar.set_postfix_str(in_words(facts, self._pace.left(step, when)), False)
        bar.update(step - bar.n)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is None:
            say(text)
        else:
            self._bar.ncols = self._columns()
            with tqdm.external_write_mode(file=sys.stdout):
                say(text)

    def close(self, leave: bool = True) -> None:
        """Close the bar; ``leave``: keep it on the screen."""
        if self._bar is not None:
            self._bar.leave = leave
            self._bar.close()
            self._bar = None

    def _columns(self) -> int | None:
        try:
            return max(os.get_terminal_size(self._stream.fileno()).columns - _ECHO, 20)
        except OSError:
            return None


class PlainLines:
    """A plain line on standard output, at the start, at the end, and at most every ten seconds."""

    def __init__(self, total: int) -> None:
        self._lines = StepLines(total)

    def begin(self, step: int, when: float) -> None:
        """Start the clock at ``step``."""
        self._lines.begin(step, when)

    def update(self, step: int, when: float, facts: Mapping[str, str]) -> None:
        """Print the step, at most every ten seconds."""
        line = self._lines.line(step, when, facts)
        if line is not None:
            say(line)

    def say(self, text: str) -> None:
        """Print a plain line."""
        say(text)

    def close(self) -> None:
        """Do nothing: no bar is open."""
