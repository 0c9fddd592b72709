"""Log metrics of training: rank 0 writes a line every ``train.log_every`` steps."""

import contextlib
import math
import os
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpcrun.config import Config
from hpcrun.devices import accelerator, vendor
from hpcrun.printing import say
from hpcrun.ranks.collective import Ranks, StopAgreement
from hpcrun.train.data.batching import worker_processes
from hpcrun.train.health.slow_nodes import SlowNodeWatch
from hpcrun.train.metrics.sinks import Sinks
from hpcrun.train.metrics.stopwatch import StepTimeMeans, Stopwatch
from hpcrun.train.metrics.timing import FlopCounter, peak_here, twin
from hpcrun.train.step.trainer import AMPTrainer, LossFunction, StepResult
from hpcrun.train.task import Task

_SLOW_DATA = 0.25
"""Part of a step from which the wait for data gets a hint; the GPU hides a shorter wait."""


def mean_over_ranks(total: float, count: float, ranks: Ranks) -> float:
    """Return ``total / count``, both summed over ``ranks``. Collective."""
    both = torch.tensor([total, count], dtype=torch.float64)
    if ranks.world_size > 1:
        dist.all_reduce(both, group=ranks.group)
    return float(both[0] / both[1])


@dataclass(frozen=True)
class StepMeasurements:
    """Measurements of each step. ``loss`` is the task's loss with timing and FLOP counting around it.

    ``peak``: FLOP/s of all devices of a rank; None: log no MFU.
    """

    watch: Stopwatch
    flops: FlopCounter
    loss: LossFunction
    peak: float | None


def measure(config: Config, task: Task, model: nn.Module, device: torch.device) -> StepMeasurements:
    """Wrap the task's loss with measurements; call before ``model`` is moved, prepared or wrapped."""
    watch = Stopwatch(device)
    peak = peak_here(device, config.amp.dtype, config.watch.peak_flops)
    if peak is not None and accelerator.is_accelerator(device) and config.train.parallel == "dp":
        peak *= accelerator.count()
    flops = FlopCounter(None if peak is None else twin(model), task.flops_per_sample)
    return StepMeasurements(watch, flops, watch.timed(flops.counting(task.loss)), peak)


class MetricsLog:
    """Collects losses on the device; at logged steps, reads them and gathers the ranks' measurements."""

    def __init__(
        self,
        config: Config,
        task: Task,
        trainer: AMPTrainer,
        measured: StepMeasurements,
        sinks: Sinks | None,
        *,
        ranks: Ranks,
        attempt: Mapping[str, int],
        slow: SlowNodeWatch,
        agreement: StopAgreement,
    ) -> None:
        """Store the arguments; every line has the columns ``attempt``."""
        self._agreement, self._agreed = agreement, 0.0
        self._trainer, self._sinks, self._ranks, self._attempt = trainer, sinks, ranks, attempt
        self._watch, self._flops, self._peak = measured.watch, measured.flops, measured.peak
        self._every, self._end = config.train.log_every, config.train.steps
        self._batch_size = config.train.batch_size
        self._unit, self._units_per_sample = task.unit, task.units_per_sample
        self._window = LossWindow()
        self._slow = slow
        self._workers = worker_processes(config, os.environ, task.loader_processes)
        self._lines, self._hinted = 0, False
        self._gpu = vendor.gpu_utilization(trainer.device)
        self._samples = measured.watch.on_device

    def step(self, done: int, result: StepResult) -> None:
        """Record the result of a step; ``done``: finished steps. Collective at logged steps."""
        self._window.results.append(result)
        if self._is_logged(done):
            self.log_pending(done)
        if self._samples:
            self._watch.sample(self._is_logged(done + 1))

    def log_pending(self, done: int) -> None:
        """Log the steps since the last line, if any; ``done``: finished steps. Collective."""
        results = self._window.results
        if not results:
            return
        steps, loss = len(results), self._window.mean()
        lap = self._watch.lap(steps)
        stop, self._agreed = self._agreement.seconds - self._agreed, self._agreement.seconds
        ranks = self._gather(loss, lap, stop / steps)
        if ranks is not None:
            self._log(done, results[-1], ranks)
            times, own = [one[1] for one in ranks], [one[3] for one in ranks]
            self._slow.add(done, steps, own, max(times))

    def saved(self) -> list[float]:
        """Return what a checkpoint needs about unlogged steps. Collective."""
        return self._window.saved(self._ranks)

    def restore(self, saved: Sequence[float]) -> None:
        """Restore what :meth:`saved` returned, so the next line includes the loss of these steps."""
        self._window.restore(saved)

    def write(self, line: Mapping[str, Any]) -> None:
        """Write ``line``, which has a step, with time and restart to the sinks, on rank 0."""
        if self._sinks is not None:
            now = {"time": round(time.time(), 3), **self._attempt}
            self._sinks.write({"step": line["step"], **now, **line})

    def flush(self) -> None:
        """Flush the sinks, so that all lines survive this process."""
        if self._sinks is not None:
            self._sinks.flush()

    def close(self) -> None:
        """Close the sinks, which sends buffered lines, on rank 0; the last call."""
        if self._gpu is not None:
            self._gpu.close()
        if self._sinks is not None:
            self._sinks.close()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Exclude the block's time (a save, a validation) from the next line's rates."""
        return self._watch.paused()

    def _is_logged(self, done: int) -> bool:
        return done % self._every == 0 or done == self._end

    def _gather(self, loss: float, lap: StepTimeMeans, stop: float) -> list[list[float]] | None:
        """Gather every rank's measurements on rank 0; None on other ranks.

        They are the loss, seconds (step, data, own, stop), bytes, and the percent of the GPU's use.
        """
        memory = _memory(self._trainer.device)
        busy = math.nan if self._gpu is None else self._gpu.read()
        measured = [loss, lap.step, lap.data, lap.own, stop, memory, busy]
        if self._ranks.world_size == 1:
            return [measured]
        mine = torch.tensor(measured, dtype=torch.float64)
        if self._sinks is None:
            dist.gather(mine, group=self._ranks.group)
            return None
        found = [torch.empty_like(mine) for _ in self._slow.hosts]
        dist.gather(mine, found, group=self._ranks.group)
        return [one.tolist() for one in found]

    def _log(self, done: int, result: StepResult, ranks: list[list[float]]) -> None:
        """Write the line, on rank 0."""
        losses, steps, waits, own, stops, memory, busy = map(list, zip(*ranks, strict=True))
        step = max(steps)
        per_second = self._batch_size / step
        line: dict[str, Any] = {
            "step": done,
            "loss": sum(losses) / len(losses),
            "lr": float(result.learning_rate),
            f"{self._unit}_per_second": round(per_second * self._units_per_sample, 1),
            "step_time": _rounded(step),
            "data_wait": _rounded(max(waits)),
            "memory_gb": round(max(memory) / 1e9, 3),
            **utilization(busy),
        }
        if self._peak is not None and self._flops.per_sample is not None:
            achieved = self._flops.per_sample * per_second
            line["mfu"] = _rounded(achieved / (self._peak * len(ranks)))
        if len(ranks) > 1:
            slowest = own.index(max(own))
            line |= {
                "stop_wait": _rounded(max(stops)),
                "slowest_rank": slowest,
                "slowest_host": self._slow.hosts[slowest],
                "slowest_own_time": _rounded(own[slowest]),
                "fastest_own_time": _rounded(min(own)),
            }
        if result.gradient_norm is not None:
            line["gradient_norm"] = result.gradient_norm.item()
        if self._trainer.scaler.is_enabled():
            line["loss_scale"] = self._trainer.scaler.get_scale()
        if self._trainer.gate.skipped:
            line["skipped"] = self._trainer.gate.skipped
        self.write(line)
        self._hint(max(waits) / step)

    def _hint(self, waiting: float) -> None:
        """Print once that data is slow; ``waiting``: part of a step."""
        # The first line includes the start of the loader processes.
        self._lines += 1
        on_gpu = accelerator.is_accelerator(self._trainer.device)
        if self._hinted or self._lines == 1 or waiting < _SLOW_DATA or not on_gpu:
            return
        self._hinted = True
        say(
            f"hpcrun: data.workers: {waiting:.0%} of a step is the wait for a batch, with {self._workers} "
            "loader processes per rank; raise it, up to the cores of a rank (job.cpus_per_task)"
        )


def _memory(device: torch.device) -> float:
    """Return this process's peak memory in bytes: tensors on a GPU, or the resident set on the CPU."""
    if accelerator.is_accelerator(device):
        return float(accelerator.peak_memory(device))
    # Linux reports kB (getrusage(2)).
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def utilization(busy: Sequence[float]) -> dict[str, float]:
    """Return the values of a metrics line about the use of the GPUs; empty if no rank knows it.

    Args:
        busy: percent of each rank's GPU; NaN: unknown.
    """
    known = {rank: percent for rank, percent in enumerate(busy) if not math.isnan(percent)}
    if not known:
        return {}
    found = {"gpu_utilization": round(sum(known.values()) / len(known), 1)}
    if len(busy) == 1:
        return found
    idlest = min(known, key=known.__getitem__)
    return found | {"lowest_gpu_utilization": round(known[idlest], 1), "lowest_gpu_rank": idlest}


def _rounded(value: float) -> float:
    """Round to four significant digits; the rest is noise."""
    return float(f"{value:.4g}")


class LossWindow:
    """Sums the losses of unlogged steps, without skipped steps.

    ``results``: this process's unlogged steps.
    """

    def __init__(self) -> None:
        self.results: list[StepResult] = []
        self._before = (0.0, 0.0)

    def mean(self) -> float:
        """Return this rank's mean loss, NaN if all steps were skipped, and reset. Waits for the device once.

        The mean over ranks is the mean over all samples.
        """
        loss, steps = self._sums()
        self.results, self._before = [], (0.0, 0.0)
        return loss / steps if steps else math.nan

    def saved(self, ranks: Ranks) -> list[float]:
        """Return what a checkpoint needs, identical on all ``ranks``. Collective."""
        loss, steps = self._sums()
        if not self.results and not steps:
            return []
        return [mean_over_ranks(loss, 1.0, ranks), steps]

    def restore(self, saved: Sequence[float]) -> None:
        """Restore what :meth:`saved` returned, on any number of ranks."""
        if saved:
            self._before = saved[0], saved[1]

    def _sums(self) -> tuple[float, float]:
        """Return the sum of the losses, and the number of its steps."""
        loss, steps = self._before
        if self.results:
            # A few numbers sum faster on the host than on the device.
            losses: list[float] = torch.stack([result.loss for result in self.results]).tolist()
            for one, result in zip(losses, self.results, strict=True):
                if not result.decision.peek():
                    loss, steps = loss + one, steps + 1
        return loss, steps
