"""Time a step on this rank: the wait for data, the rank's own work, and the whole step.

In a step all ranks wait for the slowest rank, so whole-step times are equal and do not show which rank is
slow. The own work of a rank is its wait for data and its forward pass, without the waits for other ranks in
between: under FSDP each unit waits for its weights, under DDP a model with buffers waits for those of rank 0.
"""

import contextlib
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hpcrun.devices import accelerator
from hpcrun.train.data.batches import Steps
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.step.trainer import LossFunction


@dataclass(frozen=True)
class StepTimeMeans:
    """Means over some steps, in seconds per step. ``own``: waiting for data plus the own forward pass.

    ``own`` excludes the first step of a process, and a step right after a save or a validation.
    """

    step: float
    data: float
    own: float


class Stopwatch:
    """Sums the times of the steps since the last lap. On the CPU it costs a few clock readings per step.

    On a GPU (``on_device``), events time the forward pass of the step before a lap: a sample, at no cost for
    other steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._since = time.perf_counter()
        self._waited = 0.0
        # Own work of each step, and the places of the steps that do not count.
        self._own: list[float] = []
        self._apart = {0}
        self._device = device
        self.on_device = accelerator.is_accelerator(device)
        self._passes, self._sampled = 0, 0.0
        self._forward = self._waiting = False
        self._wait_began = self._waits = 0.0
        # The pass comes first, then its waits; ``_used``: the spans of the newest pass.
        self._spans: list[tuple[torch.Event, torch.Event]] = []
        self._used = 0
        # The first step may be a logged step.
        self._sampling = True

    def start(self) -> None:
        """Start measuring; the time before was preparation."""
        self._since = time.perf_counter()

    def batches(self, steps: Steps) -> Generator[MicroBatches, None, None]:
        """Yield the micro-batches of ``steps``, and time the wait for them. Closing ends the loader."""
        iterator, clock = iter(steps), time.perf_counter
        try:
            while True:
                began = clock()
                micro_batches = next(iterator, None)
                if micro_batches is None:
                    return
                self.waited(clock() - began)
                yield micro_batches
        finally:
            steps.close()

    def waited(self, seconds: float) -> None:
        """Begin a step whose data needed ``seconds`` of waiting."""
        self._waited += seconds
        self._own.append(seconds)

    def sample(self, wanted: bool) -> None:
        """GPU: set whether to time the forward passes of the next step. The CPU times all of them."""
        self._sampling = wanted
        if wanted:
            self._passes = 0

    def timed(self, loss: LossFunction) -> LossFunction:
        """Wrap ``loss`` to time each forward pass."""
        return self._timed_on_device(loss) if self.on_device else self._timed_here(loss)

    def exclude_waits(self, model: nn.Module, *, compiled: bool) -> None:
        """Exclude from forward passes the time in which ``model``, as wrapped, waits for other ranks.

        The hooks run before and after the hook or the call that waits. Collectives of the model itself
        count as work, such as those of a synchronized batch norm.
        """
        for part in model.modules():
            if isinstance(part, FSDPModule):
                assert isinstance(part, nn.Module)
                part.register_forward_pre_hook(self._wait_begins, prepend=True)
                part.register_forward_pre_hook(self._wait_ends)
        # In a compiled DDP model, the hooks would split the graph.
        if isinstance(model, DistributedDataParallel) and not compiled:
            model.register_forward_pre_hook(self._wait_begins)
            model.module.register_forward_pre_hook(self._wait_ends)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block's time (a save, a validation), and the own work of the next step."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began
        self._apart.add(len(self._own))

    def lap(self, steps: int) -> StepTimeMeans:
        """Return the means of the last ``steps`` steps, which the device has finished, and reset."""
        now = time.perf_counter()
        counted = [own for place, own in enumerate(self._own) if place not in self._apart]
        # If all steps follow a save, they are the best measurement that there is.
        counted = counted or self._own or [0.0]
        own = sum(counted) / len(counted)
        if self.on_device:
            if self._passes:
                whole, *waits = (
                    accelerator.milliseconds(*span) for span in self._spans[: self._used]
                )
                self._sampled = (whole - sum(waits)) / 1e3 * self._passes
            # After an early end, the last measured step is used.
            own += self._sampled
        lap = StepTimeMeans((now - self._since) / steps, self._waited / steps, own)
        # A pause after the last step concerns the next step.
        self._apart = {0} if len(self._own) in self._apart else set()
        self._since, self._waited = now, 0.0
        self._own, self._passes = [], 0
        return lap

    def _timed_here(self, loss: LossFunction) -> LossFunction:
        def timed(model: nn.Module, batch: Any) -> Tensor:
            self._forward, self._waits, began = True, 0.0, time.perf_counter()
            value = loss(model, batch)
            self._forward = False
            if self._own:
                self._own[-1] += time.perf_counter() - began - self._waits
            return value

        return timed

    def _timed_on_device(self, loss: LossFunction) -> LossFunction:
        def timed(model: nn.Module, batch: Any) -> Tensor:
            if not self._sampling:
                return loss(model, batch)
            self._passes += 1
            self._forward, self._used = True, 0
            start, end = self._span()
            accelerator.record(start, self._device)
            value = loss(model, batch)
            accelerator.record(end, self._device)
            self._forward = False
            return value

        return timed

    # Activation checkpointing runs units again in the backward pass; ``_forward`` is then False. A compiled
    # unit must not trace the clock.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _wait_begins(self, *_: Any) -> None:
        if not self._forward:
            return
        self._waiting = True
        if self.on_device:
            accelerator.record(self._span()[0], self._device)
        else:
            self._wait_began = time.perf_counter()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _wait_ends(self, *_: Any) -> None:
        # A loss may call the module inside DDP itself; then nothing waits.
        if not self._waiting:
            return
        self._waiting = False
        if self.on_device:
            accelerator.record(self._spans[self._used - 1][1], self._device)
        else:
            self._waits += time.perf_counter() - self._wait_began

    def _span(self) -> tuple[torch.Event, torch.Event]:
        """Return the events for the next time span of this pass; later passes use them again."""
        if self._used == len(self._spans):
            start, end = (accelerator.event(self._device, timing=True) for _ in range(2))
            self._spans.append((start, end))
        self._used += 1
        return self._spans[self._used - 1]
