"""Destinations of metrics: metrics.jsonl and rank 0's log; TensorBoard, and the sinks of add-ons by name."""

import atexit
import time
from collections.abc import Callable, Mapping
from typing import Any

from hpcrun.config import Config, masked_values
from hpcrun.errors import UserError, one_line
from hpcrun.ports.entry_points import SINKS
from hpcrun.ports.sinks import Sink, TrainingStart, numbers
from hpcrun.printing import say, say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.run.progress_lines import StepLines, facts_of, validation_line
from hpcrun.run.streams import LineWriter


class JsonLines(LineWriter, Sink):
    """Writer of metrics.jsonl in the run directory."""

    def __init__(self, run: RunDirectory, *, pause: float = 0.2) -> None:
        """Write to the metrics of ``run``; ``pause``: seconds between two writes."""
        super().__init__(run.metrics, pause=pause)


class RankZeroLog(Sink):
    """Log lines of rank 0: loss, speed and remaining time, now and then."""

    def __init__(self, total: int, start: int) -> None:
        self._lines = StepLines(total)
        self._lines.begin(start, time.time())

    def write(self, line: Mapping[str, Any]) -> None:
        texts = [validation_line(line)]
        if self._lines.due(line["step"]):
            texts.append(self._lines.line(line["step"], time.time(), facts_of(line)))
        for text in texts:
            if text is not None:
                say(text)


class TensorBoard(Sink):
    """Event files for TensorBoard. After a restart, lines beyond the restored step are hidden."""

    def __init__(self, training: TrainingStart) -> None:
        """Begin the files of this attempt; raises UserError if TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "watch.tensorboard: the package tensorboard is not installed; "
                "`pip install tensorboard`, or remove the key"
            ) from error
        self._writer: Any = SummaryWriter(
            str(RunDirectory(training.run).tensorboard),
            purge_step=training.step + 1 if training.step else None,
            flush_secs=10,
        )

    def write(self, line: Mapping[str, Any]) -> None:
        for name, value in numbers(line).items():
            self._writer.add_scalar(name, value, line["step"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Sinks:
    """All sinks of a run, on rank 0. If a sink fails, its lines are lost; its first failure is printed."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks
        self._failed: set[int] = set()

    def write(self, line: Mapping[str, Any]) -> None:
        """Write ``line`` to every sink."""
        self._each(lambda sink: sink.write(line))

    def flush(self) -> None:
        """Flush every sink."""
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        """Close every sink; later writes go nowhere."""
        self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, act: Callable[[Sink], None]) -> None:
        for number, sink in enumerate(self._sinks):
            try:
                act(sink)
            except Exception as error:
                if number not in self._failed:
                    self._failed.add(number)
                    name = "metrics" if isinstance(sink, JsonLines) else type(sink).__name__
                    say_aside(f"hpcrun: cannot write {name}: {error}; the training continues")


def build_sinks(run: RunDirectory, config: Config, start: int) -> Sinks:
    """Make the configured sinks; ``start``: the restored step. Raises UserError if a package is missing."""
    sinks: list[Sink] = [JsonLines(run), RankZeroLog(config.train.steps, start)]
    names = _names(config)
    if names:
        values = masked_values(config.model_dump(mode="json"))
        training = TrainingStart(run.path, values, start)
        sinks += [sink for name in names if (sink := _made(name, training)) is not None]
    built = Sinks(sinks)
    # For a failed training: the worker runs the atexit functions (worker.leave).
    atexit.register(built.close)
    return built


def _names(config: Config) -> list[str]:
    """Return the names of the sinks that the config adds to metrics.jsonl and the log."""
    watch = config.watch
    own = [*["tensorboard"] * watch.tensorboard, *["wandb"] * (watch.wandb is not None)]
    return list(dict.fromkeys([*own, *watch.sinks]))


def _made(name: str, training: TrainingStart) -> Sink | None:
    """Return the sink ``name``; None, with a line, if its constructor fails.

    Raises:
        UserError: there is no such sink, its package cannot be imported, or it refuses the start.
    """
    kind = SINKS.load(name)
    try:
        sink: Sink = kind(training)
    except UserError:
        raise
    except Exception as error:
        reason = one_line(error)
        say_aside(f"hpcrun: watch.sinks: {name}: {reason}; the training continues without it")
        return None
    return sink
