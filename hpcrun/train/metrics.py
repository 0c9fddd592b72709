"""What training logs: one line of metrics.jsonl a logged step, by rank 0."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import append_line
from hpcrun.train.trainer import AMPTrainer, StepResult


def mean_over_ranks(total: float, count: float, group: Any) -> float:
    """``total / count`` with both summed over the ranks of ``group`` (None: this rank alone)."""
    both = torch.tensor([total, count], dtype=torch.float64)
    if group is not None:
        dist.all_reduce(both, group=group)
    return float(both[0] / both[1])


class MetricsLog:
    """Collects losses on the device and writes a line every ``every`` steps: only then is it read back."""

    def __init__(
        self,
        run: RunDirectory,
        trainer: AMPTrainer,
        *,
        group: Any,
        every: int,
        restart: int,
        units_per_step: int,
        unit: str,
    ) -> None:
        """``units_per_step``: samples or tokens of one optimiser step over all ranks."""
        self._run, self._trainer, self._group = run, trainer, group
        self._every, self._restart = every, restart
        self._units, self._unit = units_per_step, unit
        self._losses: list[Tensor] = []
        self._since = time.perf_counter()
        self._complained = False

    def step(self, done: int, result: StepResult, last: bool) -> None:
        """Note the result of a step, ``done`` of them being finished. Collective at logged steps."""
        self._losses.append(result.loss)
        if done % self._every and not last:
            return
        mine = torch.stack(self._losses).double().mean().item()
        loss = mean_over_ranks(mine, 1.0, self._group)
        now = time.perf_counter()
        rate = self._units * len(self._losses) / (now - self._since)
        self._losses, self._since = [], now
        line: dict[str, Any] = {
            "step": done,
            "time": round(time.time(), 3),
            "restart": self._restart,
            "loss": loss,
            "lr": float(result.learning_rate),
            f"{self._unit}_per_second": round(rate, 1),
        }
        if result.gradient_norm is not None:
            line["gradient_norm"] = result.gradient_norm.item()
        if self._trainer.scaler.is_enabled():
            line["loss_scale"] = self._trainer.scaler.get_scale()
        self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        """Append ``line`` on rank 0. A full disk costs lines of the log, not the training."""
        if not self._trainer.is_main_process:
            return
        try:
            append_line(self._run.metrics, line)
        except OSError as error:
            if not self._complained:
                print(f"hpcrun: metrics are not written: {error}", file=sys.stderr, flush=True)
            self._complained = True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of the next line's rate (a save, a validation)."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began
