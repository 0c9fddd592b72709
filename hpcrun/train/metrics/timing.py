"""Time a step on this rank: waiting for data, its own forward pass, and the whole step.

The forward pass is timed separately because a rank computes it without waiting for other ranks. In the rest
of a step all ranks wait for the slowest rank, so whole-step times are equal and do not show which rank is
slow.
"""

import contextlib
import copy
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hpcrun.checkpoint.state import capture
from hpcrun.devices import accelerator
from hpcrun.run.directory import RunDirectory
from hpcrun.train.data.batches import Steps
from hpcrun.train.position import PROFILING, Position
from hpcrun.train.step.precision import to_device
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


_BACKWARD = 2
"""FLOPs of a backward pass in forward passes: gradients of the inputs, and of the weights."""

# Peak FLOP/s of dense matrix products by part of torch's device name, more specific names first.
# From the vendors' data sheets; figures given with sparsity are halved. NVIDIA: GB300 and B300 2025, GB200
# and B200 2025, H200 2024, H100 and H800 2023, H20 2024, A100 and A800 2021, L40S, L40 and L4 2023, A40, A30
# and A10 2021, A10G 2022, RTX 6000 Ada 2023, RTX A6000 2021, GeForce RTX 4090 (Ada white paper, fp32
# accumulation) 2022, V100 and V100S 2020, T4 2019. AMD: MI355X and MI350X 2025, MI325X 2024, MI300X and
# MI300A 2023, MI250X and MI250 2022. torch sees each half of an MI250 as a device. AMD's fp32 is that of the
# matrix cores.
_T = 1e12
_PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
PEAKS: tuple[tuple[str, tuple[float, float, float, float]], ...] = (
    # TFLOP/s in the order of _PRECISIONS; 0: the device lacks this precision.
    ("GB300", (2500, 2500, 1250, 80)),
    ("B300", (2250, 2250, 1100, 75)),
    ("GB200", (2500, 2500, 1250, 80)),
    ("B200", (2250, 2250, 1100, 75)),
    ("GH200", (989, 989, 494, 67)),
    ("H200 NVL", (835, 835, 417, 60)),
    ("H200", (989, 989, 494, 67)),
    ("H100 PCIe", (756, 756, 378, 51)),
    ("H100 NVL", (835, 835, 417, 60)),
    ("H100", (989, 989, 494, 67)),
    ("H800 PCIe", (756, 756, 378, 51)),
    ("H800", (989, 989, 494, 67)),
    ("H20", (148, 148, 74, 44)),
    # Not A100-SXM-64GB, which has more multiprocessors.
    (r"A100(?!-SXM-64GB)", (312, 312, 156, 19.5)),
    ("A800", (312, 312, 156, 19.5)),
    ("A40", (149.7, 149.7, 74.8, 37.4)),
    ("A30", (165, 165, 82, 10.3)),
    ("A10G", (70, 70, 35, 35)),
    ("A10", (125, 125, 62.5, 31.2)),
    ("L40S", (362, 362, 183, 91.6)),
    ("L40", (181, 181, 90.5, 90.5)),
    ("L4", (121, 121, 60, 30.3)),
    ("RTX 6000 Ada Generation", (364, 364, 182, 91.1)),
    ("RTX A6000", (154.8, 154.8, 77.4, 38.7)),
    # Not the 4090 D, and not that of laptops.
    (r"RTX 4090(?! D| Laptop)", (165.2, 165.2, 82.6, 82.6)),
    ("V100S-PCIE", (0, 130, 0, 16.4)),
    ("V100-SXM[23]", (0, 125, 0, 15.7)),
    ("V100-PCIE", (0, 112, 0, 14)),
    ("T4", (0, 65, 0, 8.1)),
    ("MI355X", (2516, 2516, 0, 157)),
    ("MI350X", (2307, 2307, 0, 144)),
    ("MI325X", (1307, 1307, 653, 163)),
    ("MI300X", (1307, 1307, 653, 163)),
    ("MI300A", (980, 980, 490, 122)),
    ("MI250X", (191.5, 191.5, 0, 47.9)),
    ("MI250", (181, 181, 0, 45.3)),
)


def peak_of(device_name: str, dtype: str) -> float | None:
    """Return the device's peak in FLOP/s for ``dtype`` (as in AMPConfig); None if unknown."""
    if " MIG " in device_name:
        return None  # A slice of a device, which has the name of the whole device.
    for name, peaks in PEAKS:
        # As a whole word: an A10G is not an A10, and an L40 is not an L4.
        if re.search(rf"\b{name}\b", device_name):
            return dict(zip(_PRECISIONS, peaks, strict=True)).get(dtype, 0) * _T or None
    return None


def peak_here(device: torch.device, dtype: str, given: float | None) -> float | None:
    """Return ``given``, the config's value, or else the known peak of ``device``."""
    if given is not None or not accelerator.is_accelerator(device):
        return given
    return peak_of(accelerator.name(device), dtype)


def twin(module: nn.Module) -> nn.Module | None:
    """Copy ``module`` without weights (meta tensors), for counting; None if it cannot be copied."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = buffer.to("meta")
    try:
        return copy.deepcopy(module, memo)
    # A module may hold anything, including objects that cannot be copied.
    except Exception:
        return None


def forward_flops(
    module: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any
) -> float | None:
    """Count the FLOPs of one forward pass of ``batch`` through ``module``, a :func:`twin`.

    Returns None for a model that reads values of tensors, or uses tensors that it does not register: both
    need data. Restores the random generators.
    """
    generators = capture.capture_rank()
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.no_grad():
            loss(module, to_device(batch, torch.device("meta")))
    # User code may fail in any way on tensors without data; then there is no MFU.
    except Exception:
        return None
    finally:
        capture.apply_rank(generators)
    return float(counter.get_total_flops()) or None


def samples_in(batch: Any) -> int | None:
    """Return the first dimension of the first tensor in ``batch``; None without tensors."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    values = batch.values() if isinstance(batch, dict) else batch
    if not isinstance(batch, dict | list | tuple):
        return None
    return next((found for value in values if (found := samples_in(value))), None)


class FlopCounter:
    """Counts the FLOPs per training sample at the first batch: three times the forward pass."""

    def __init__(self, module: nn.Module | None, given: float | None) -> None:
        """``module``: a :func:`twin`, or None for no count; ``given``: the task's own figure."""
        self._twin = None if given is not None else module
        self.per_sample = given

    def counting(
        self, loss: Callable[[nn.Module, Any], Tensor]
    ) -> Callable[[nn.Module, Any], Tensor]:
        """Wrap ``loss``; the first call also runs it once on a batch without data."""
        if self._twin is None:
            return loss

        def counted(model: nn.Module, batch: Any) -> Tensor:
            if self._twin is not None:
                module, self._twin = self._twin, None
                module.train(model.training)
                flops, samples = forward_flops(module, loss, batch), samples_in(batch)
                if flops and samples:
                    self.per_sample = (1 + _BACKWARD) * flops / samples
            return loss(model, batch)

        return counted


_NEVER = -1
_ROWS = 30
_SHOWN = 5


def steps_of(window: str | None) -> range:
    """Parse ``10-15`` as the steps from 9 to 14: users count from 1, as metrics.jsonl does."""
    if window is None:
        return range(0)
    first, _, last = window.partition("-")
    return range(int(first) - 1, int(last or first))


class Profile:
    """Profiles the steps of the window; in other steps it only compares two numbers."""

    def __init__(
        self,
        run: RunDirectory,
        window: str | None,
        start: int,
        *,
        rank: int,
        device: torch.device,
        watch: Stopwatch,
        position: Position,
    ) -> None:
        """``window``: as in the config; ``start``: the first step of this process."""
        self._folder, self._rank = run.profile, rank
        self._device, self._watch, self._position = device, watch, position
        steps = steps_of(window)
        self._last = steps.stop
        self._next = max(steps.start, start) if start < steps.stop else _NEVER
        self._first = self._next
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Start or end the profile; call it at the beginning of every step."""
        if step == self._next:
            self._turn(step)

    def close(self, done: int) -> None:
        """End the profile if training ends in the window; ``done``: finished steps."""
        if self._profiler is not None:
            self._turn(done)

    @property
    def _on_gpu(self) -> bool:
        return accelerator.is_accelerator(self._device)

    def _turn(self, done: int) -> None:
        with self._position.at(PROFILING), self._watch.paused():
            if self._profiler is None:
                self._begin()
            else:
                self._end(done)

    def _begin(self) -> None:
        self._profiler = torch.profiler.profile(
            activities=accelerator.profiled(self._device), record_shapes=True
        )
        self._profiler.start()
        self._next = self._last

    def _end(self, done: int) -> None:
        profiler, self._profiler, self._next = self._profiler, None, _NEVER
        accelerator.synchronize(self._device)
        profiler.stop()
        operations = profiler.key_averages()
        kind = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        name = f"rank-{self._rank:05d}"
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"trace-{name}.json.gz"))
            table = operations.table(sort_by=kind, row_limit=_ROWS, max_name_column_width=80)
            (self._folder / f"operations-{name}.txt").write_text(table)
        except (OSError, RuntimeError) as error:
            print(f"hpcrun: cannot write the profile: {error}", file=sys.stderr, flush=True)
        if self._rank == 0:
            print(self._summary(operations, kind, done), flush=True)

    def _summary(self, operations: Any, kind: str, done: int) -> str:
        times = {it.key: getattr(it, kind) for it in operations}
        total = sum(times.values()) or 1.0
        top = sorted(times.items(), key=lambda item: -item[1])[:_SHOWN]
        where = "GPU" if self._on_gpu else "CPU"
        first = self._first + 1
        # The profiled steps, not the requested window: an attempt may start or end within it.
        steps = f"step {done}" if done == first else f"steps {first}-{done}"
        lines = [f"hpcrun: profile of {steps}, by {where} time, in {self._folder}"]
        lines += [
            f"hpcrun:   {spent / total:4.0%}  {spent / 1e3:8.1f} ms  {name}" for name, spent in top
        ]
        return "\n".join(lines)
