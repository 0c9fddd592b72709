"""Time a step on this rank: waiting for data, its own forward pass, and the whole step.

The forward pass is timed separately because a rank computes it without waiting for other ranks. In the rest
of a step all ranks wait for the slowest rank, so whole-step times are equal and do not show which rank is
slow.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpcrun.devices import accelerator
from hpcrun.train.data.batches import Steps
from hpcrun.train.step.trainer import LossFunction


@dataclass(frozen=True)
class StepTimeMeans:
    """Means over some steps, in seconds per step. ``own``: waiting for data plus the forward pass."""

    step: float
    data: float
    own: float


class Stopwatch:
    """Sums the times of the steps since the last lap. On the CPU it costs three clock readings per step."""

    def __init__(self, device: torch.device) -> None:
        self._since = time.perf_counter()
        self._waited = self._forward = self._sampled = 0.0
        self._device = device
        self._events: tuple[torch.Event, torch.Event] | None = None
        self._passes = 0
        if accelerator.is_accelerator(device):
            start, end = (accelerator.event(device, timing=True) for _ in range(2))
            self._events = start, end
        # The first step may be a logged step.
        self._sampling = True

    def start(self) -> None:
        """Start measuring; the time before was preparation."""
        self._since = time.perf_counter()

    def batches(self, steps: Steps) -> "TimedSteps":
        """Wrap ``steps`` to time how long training waits for each step's data."""
        return TimedSteps(steps, self)

    def waited(self, seconds: float) -> None:
        """Add ``seconds`` of waiting for data."""
        self._waited += seconds

    def sample(self, wanted: bool) -> None:
        """GPU: set whether to time the forward passes of the next step. The CPU times all of them."""
        self._sampling = wanted
        if wanted:
            self._passes = 0

    def timed(self, loss: LossFunction) -> LossFunction:
        """Wrap ``loss`` to time each forward pass."""
        if self._events is not None:
            return self._timed_on_device(loss, *self._events)

        def timed(model: nn.Module, batch: Any) -> Tensor:
            began = time.perf_counter()
            value = loss(model, batch)
            self._forward += time.perf_counter() - began
            return value

        return timed

    def _timed_on_device(
        self, loss: LossFunction, start: torch.Event, end: torch.Event
    ) -> LossFunction:
        def timed(model: nn.Module, batch: Any) -> Tensor:
            if not self._sampling:
                return loss(model, batch)
            self._passes += 1
            accelerator.record(start, self._device)
            value = loss(model, batch)
            accelerator.record(end, self._device)
            return value

        return timed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block's time (a save, a validation)."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def lap(self, steps: int) -> StepTimeMeans:
        """Return the means of the last ``steps`` steps, which the device has finished, and reset."""
        now = time.perf_counter()
        forward = self._forward / steps
        if self._events is not None:
            if self._passes:
                start, end = self._events
                self._sampled = accelerator.milliseconds(start, end) / 1e3 * self._passes
            # After an early end, the last measured step is used.
            forward = self._sampled
        data = self._waited / steps
        lap = StepTimeMeans((now - self._since) / steps, data, data + forward)
        self._since, self._waited, self._forward, self._passes = now, 0.0, 0.0, 0
        return lap


class TimedSteps:
    """Iterator over the steps of a loader that times the waiting."""

    def __init__(self, steps: Steps, watch: Stopwatch) -> None:
        self._steps, self._watch = steps, watch
        self._iterator = iter(steps)

    def __next__(self) -> list[Any]:
        began = time.perf_counter()
        micro_batches = next(self._iterator)
        self._watch.waited(time.perf_counter() - began)
        return micro_batches

    def close(self) -> None:
        """End the loader processes."""
        self._steps.close()
