"""Where metrics go: always metrics.jsonl and rank 0's log, on request TensorBoard and Weights & Biases."""

import atexit
import hashlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.printing import say
from hpcrun.run.directory import RunDirectory
from hpcrun.run.figures import StepLines, facts_of, validation_line
from hpcrun.run.io.files import read_json
from hpcrun.run.io.line_writer import LineWriter


class Sink(Protocol):
    """Takes the lines of rank 0."""

    def write(self, line: Mapping[str, Any]) -> None:
        """Take one line; ``line["step"]`` is the number of steps done. Raises OSError on a full disk."""
        ...

    def flush(self) -> None:
        """Have what was taken so far outlive this process, where that costs little."""
        ...

    def close(self) -> None:
        """Send what is held back."""
        ...


class JsonLines:
    """metrics.jsonl in the run directory."""

    def __init__(self, run: RunDirectory) -> None:
        self._lines = LineWriter(run.metrics)

    def write(self, line: Mapping[str, Any]) -> None:
        self._lines.write(line)

    def flush(self) -> None:
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()


class RankLog:
    """What rank 0 prints: loss, speed and the time that is left, a line now and then."""

    def __init__(self, total: int, start: int) -> None:
        self._lines = StepLines(total)
        self._lines.begin(start, time.time())

    def write(self, line: Mapping[str, Any]) -> None:
        for told in (
            validation_line(line),
            self._lines.line(line["step"], time.time(), facts_of(line)),
        ):
            if told is not None:
                say(told)

    def flush(self) -> None:
        """Each line is flushed."""

    def close(self) -> None:
        """Nothing is held back."""


class TensorBoard:
    """Event files for TensorBoard. After a restart, what lies beyond the restored step is hidden."""

    def __init__(self, run: RunDirectory, start: int) -> None:
        """``start``: the step restored from; raises UserError where TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "watch.tensorboard: the package tensorboard is not installed; "
                "`pip install tensorboard`, or leave it out"
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


class WeightsAndBiases:
    """One run of W&B for all attempts: its id comes from the run directory. Older steps are passed over."""

    def __init__(self, run: RunDirectory, config: Config, project: str) -> None:
        """Raises UserError where wandb is not installed, or does not start."""
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "watch.wandb: the package wandb is not installed; `pip install wandb`, or leave it out"
            ) from error
        try:
            self._run: Any = wandb.init(
                project=project,
                id=wandb_id(run),
                name=run.name,
                dir=str(run.path),
                resume="allow",
                config=config.model_dump(mode="json"),
            )
        except Exception as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"watch.wandb: it does not start: {reason}; log in with `wandb login`, or set "
                "job.env.WANDB_MODE=offline and send the run later with `wandb sync`"
            ) from error
        self._newest = int(self._run.step or 0)

    def write(self, line: Mapping[str, Any]) -> None:
        # W&B's steps only grow; what is computed again after a restart has the same numbers.
        if line["step"] >= self._newest:
            self._newest = line["step"]
            self._run.log(_numbers(line), step=line["step"])

    def flush(self) -> None:
        """A process of W&B's own has it already."""

    def close(self) -> None:
        self._run.finish()


class Sinks:
    """All sinks of a run, on rank 0. One that fails costs lines, not the training.

    It says so once, and once more when it works again.
    """

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks
        self._failed: set[int] = set()

    def write(self, line: Mapping[str, Any]) -> None:
        """Give ``line`` to all of them."""
        self._each(lambda sink: sink.write(line), proof=True)

    def flush(self) -> None:
        """Have all of them put in safety what they were given."""
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        """Have all of them send what they hold back, once; nothing can be written any more."""
        self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, act: Callable[[Sink], None], *, proof: bool = False) -> None:
        """Do ``act`` to each sink; ``proof``: a sink that succeeds works."""
        for number, sink in enumerate(self._sinks):
            name = "metrics" if isinstance(sink, JsonLines) else type(sink).__name__
            try:
                act(sink)
                if proof and number in self._failed:
                    # Some sinks write later: only now is it known.
                    sink.flush()
                    self._failed.discard(number)
                    print(f"hpcrun: {name} are written again", file=sys.stderr, flush=True)
            except Exception as error:
                if number not in self._failed:
                    print(f"hpcrun: {name} are not written: {error}", file=sys.stderr, flush=True)
                self._failed.add(number)


def build_sinks(run: RunDirectory, config: Config, start: int) -> Sinks:
    """What the config asks for; ``start``: the step restored from. Raises UserError naming a package."""
    sinks: list[Sink] = [JsonLines(run), RankLog(config.train.steps, start)]
    if config.watch.tensorboard:
        sinks.append(TensorBoard(run, start))
    if config.watch.wandb is not None:
        sinks.append(WeightsAndBiases(run, config, config.watch.wandb))
    built = Sinks(sinks)
    # Where training fails: the worker runs these functions (worker.leave).
    atexit.register(built.close)
    return built


def wandb_id(run: RunDirectory) -> str:
    """The same for all attempts of a run, another for every run: from its name and when it was made."""
    created = (read_json(run.record) or {}).get("created")
    return hashlib.sha256(f"{run.name} {created}".encode()).hexdigest()[:16]


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in line.items()
        if isinstance(value, int | float) and name not in ("step", "time", "restart")
    }
