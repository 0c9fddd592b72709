"""Destinations of metrics: metrics.jsonl and rank 0's log; optionally TensorBoard and Weights & Biases."""

import atexit
import time
from collections.abc import Callable, Mapping
from typing import Any

from hpcrun.config import Config, masked_values
from hpcrun.errors import UserError
from hpcrun.printing import say, say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.run.progress_lines import StepLines, facts_of, validation_line
from hpcrun.run.record import wandb_id
from hpcrun.run.streams import LineWriter


class Sink:
    """Destination of rank 0's lines."""

    def write(self, line: Mapping[str, Any]) -> None:
        """Write one line; ``line["step"]`` is the number of steps done. Raises OSError on a full disk."""

    def flush(self) -> None:
        """Make written lines survive this process, if that is cheap."""

    def close(self) -> None:
        """Send buffered lines."""


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

    def __init__(self, run: RunDirectory, start: int) -> None:
        """``start``: the restored step; raises UserError if TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "watch.tensorboard: the package tensorboard is not installed; "
                "`pip install tensorboard`, or remove the key"
            ) from error
        self._writer: Any = SummaryWriter(
            str(run.tensorboard), purge_step=start + 1 if start else None, flush_secs=10
        )

    def write(self, line: Mapping[str, Any]) -> None:
        for name, value in _numbers(line).items():
            self._writer.add_scalar(name, value, line["step"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Sink):
    """One W&B run for all attempts, with an id from the run directory. Skips steps that W&B already has."""

    def __init__(self, run: RunDirectory, config: Config, project: str) -> None:
        """Start W&B; raises UserError if wandb is not installed or does not start."""
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "watch.wandb: the package wandb is not installed; `pip install wandb`, or remove the key"
            ) from error
        try:
            self._run: Any = wandb.init(
                project=project,
                id=wandb_id(run),
                name=run.name,
                dir=str(run.path),
                resume="allow",
                config=masked_values(config.model_dump(mode="json")),
            )
        except Exception as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"watch.wandb: W&B does not start: {reason}; log in with `wandb login`, or set "
                "job.env.WANDB_MODE=offline and upload the run later with `wandb sync`"
            ) from error
        self._newest = int(self._run.step or 0)

    def write(self, line: Mapping[str, Any]) -> None:
        # W&B accepts only increasing steps; steps repeated after a restart have the same numbers.
        if line["step"] >= self._newest:
            self._newest = line["step"]
            self._run.log(_numbers(line), step=line["step"])

    def close(self) -> None:
        self._run.finish()


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
    if config.watch.tensorboard:
        sinks.append(TensorBoard(run, start))
    if config.watch.wandb is not None:
        sinks.append(WeightsAndBiases(run, config, config.watch.wandb))
    built = Sinks(sinks)
    # For a failed training: the worker runs the atexit functions (worker.leave).
    atexit.register(built.close)
    return built


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in line.items()
        if isinstance(value, int | float) and name not in ("step", "time", "restart", "in_place")
    }
