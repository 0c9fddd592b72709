"""Metric sinks: destinations of a training's metrics, in addition to metrics.jsonl and the log."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainingStart:
    """The training, as a sink sees it.

    Attributes:
        run: the run directory; its name is the name of the run.
        config: the resolved config, by section, without the values that may be secret.
        step: the step that this attempt restored; 0 for a new training.
    """

    run: Path
    config: Mapping[str, Any]
    step: int


class Sink:
    """Destination of metrics, on rank 0 only.

    hpcrun makes it with one argument, the :class:`TrainingStart`, after the restore. A UserError from the
    constructor refuses the start with its line. Any other exception, there or in a method, costs lines of
    this sink: hpcrun prints the first, and the training continues. A method runs between two steps, so it
    must not wait for a server: collect the lines, and send them in a thread.

    An attempt that continues may repeat steps after the restored one, with the same values.
    """

    def write(self, line: Mapping[str, Any]) -> None:
        """Take one line of metrics.jsonl.

        Args:
            line: ``step`` is the number of steps done, ``time`` Unix seconds; the other columns are those of
                docs/watching.md.
        """

    def flush(self) -> None:
        """Make written lines survive this process, if that is cheap."""

    def close(self) -> None:
        """Send what is left. It runs once, at the end of the attempt."""


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line, without its step, time and number of the attempt.

    Args:
        line: a line that :meth:`Sink.write` got.
    """
    return {
        name: value
        for name, value in line.items()
        if isinstance(value, int | float) and name not in ("step", "time", "restart", "in_place")
    }
