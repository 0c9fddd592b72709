"""Count the arithmetic of a step, know the devices' peaks, and profile steps."""

import contextlib
import copy
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hpcrun.checkpoint.state.generators import kept_generators
from hpcrun.devices import accelerator
from hpcrun.run.directory import RunDirectory
from hpcrun.train.metrics.stopwatch import Stopwatch
from hpcrun.train.position import PROFILING, Position
from hpcrun.train.step.precision import to_device

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
    counter = FlopCounterMode(display=False)
    with kept_generators():
        try:
            with counter, torch.no_grad():
                loss(module, to_device(batch, torch.device("meta")))
        # User code may fail in any way on tensors without data; then there is no MFU.
        except Exception:
            return None
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


def step_times(events: Iterable[Any], steps: int) -> str:
    """Return how the time of a step divides, from the profiler's ``events`` of some ``steps``.

    Communication is the time of NCCL's kernels, or of gloo's operations without a GPU, and counts only while
    nothing else runs. Events have the attributes of ``torch.autograd.profiler_util.FunctionEvent``.
    """
    everything = list(events)
    on_gpu = [it for it in everything if it.device_type.name != "CPU" and not it.is_user_annotation]
    # Without a GPU: other operations contain waits.
    work = on_gpu or [it for it in everything if it.name.startswith(("aten::", "gloo:"))]
    starts, ends = zip(*map(_span, everything), strict=True)
    whole, busy = max(ends) - min(starts), _covered(map(_span, work))
    computing = (it for it in work if not it.name.startswith(("nccl", "gloo:")))
    computation = _covered(map(_span, computing))
    parts = {
        "computation": computation,
        "communication that it does not hide": busy - computation,
        "idle": whole - busy,
    }
    told = ", ".join(f"{name} {spent / steps / 1e3:.1f} ms" for name, spent in parts.items())
    return f"a step of {whole / steps / 1e3:.1f} ms: {told}"


def _span(event: Any) -> tuple[float, float]:
    return event.time_range.start, event.time_range.end


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of ``spans``."""
    length, until = 0.0, -math.inf
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, until))
        until = max(until, end)
    return length


class Profile:
    """Profiles the steps of the window; in other steps it only compares two numbers.

    A profile that fails costs neither the training nor its checkpoint.
    """

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
        # An earlier attempt that stopped in the window has written its steps.
        later = f"-from-step-{self._first + 1}" if self._first > steps.start else ""
        self._name = f"rank-{rank:05d}{later}"
        self._profiler: Any = None
        self._done: int | None = None

    def before(self, step: int) -> None:
        """Start or end the profile; call it at the beginning of every step."""
        if step == self._next:
            if self._profiler is None:
                self._begin()
            else:
                self.stop(step)
                self.close()

    def stop(self, done: int) -> None:
        """End the recording, if there is one; ``done``: finished steps. Call it before a last save."""
        if self._profiler is None or self._done is not None:
            return
        self._done = done
        with self._position.at(PROFILING), self._watch.paused():
            # Not caught: an error of the device is one of the training.
            accelerator.synchronize(self._device)
            with self._tolerated():
                self._profiler.stop()

    def close(self) -> None:
        """Write what was recorded, if that is not written yet."""
        if self._profiler is not None and self._done is not None:
            with self._position.at(PROFILING), self._watch.paused(), self._tolerated():
                self._write(self._done)

    @contextlib.contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Give the profile up after an error in the block, and print the error."""
        try:
            yield
        except Exception as error:
            self._profiler, self._next = None, _NEVER
            print(f"hpcrun: cannot write the profile: {error}", file=sys.stderr, flush=True)

    @property
    def _on_gpu(self) -> bool:
        return accelerator.is_accelerator(self._device)

    def _begin(self) -> None:
        with self._position.at(PROFILING), self._watch.paused():
            self._profiler = torch.profiler.profile(
                activities=accelerator.profiled(self._device), record_shapes=True
            )
            self._profiler.start()
        self._next = self._last

    def _write(self, done: int) -> None:
        profiler, self._profiler, self._next = self._profiler, None, _NEVER
        operations = profiler.key_averages()
        times = step_times(profiler.events(), done - self._first)
        kind = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        # The summary is printed on a full disk too.
        with self._tolerated():
            self._folder.mkdir(mode=0o700, exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"trace-{self._name}.json.gz"))
            table = operations.table(sort_by=kind, row_limit=_ROWS, max_name_column_width=80)
            (self._folder / f"operations-{self._name}.txt").write_text(f"{times}\n{table}")
        if self._rank == 0:
            print(self._summary(operations, kind, done, times), flush=True)

    def _summary(self, operations: Any, kind: str, done: int, times: str) -> str:
        spent_in = {it.key: getattr(it, kind) for it in operations}
        total = sum(spent_in.values()) or 1.0
        top = sorted(spent_in.items(), key=lambda item: -item[1])[:_SHOWN]
        where = "GPU" if self._on_gpu else "CPU"
        first = self._first + 1
        # The profiled steps, not the requested window: an attempt may start or end within it.
        steps = f"step {done}" if done == first else f"steps {first}-{done}"
        lines = [
            f"hpcrun: profile of {steps}, by {where} time, in {self._folder}",
            f"hpcrun:   {times}",
        ]
        lines += [
            f"hpcrun:   {spent / total:4.0%}  {spent / 1e3:8.1f} ms  {name}" for name, spent in top
        ]
        return "\n".join(lines)
