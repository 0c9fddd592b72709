"""Model FLOP/s utilization (MFU): the model's FLOP/s as a fraction of the device's peak."""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hpcrun.checkpoint.state import capture
from hpcrun.device import accelerator
from hpcrun.train.step.to_device import to_device

_BACKWARD = 2
"""FLOPs of a backward pass in forward passes: gradients of the inputs, and of the weights."""

# Peak FLOP/s of dense matrix products by part of torch's device name, more specific names first.
# From the vendors' data sheets (GB200 and B200: 2025, A100: 2021, H100: 2023, H200: 2024, L40S and L4: 2023,
# A40, A30: 2021, V100: 2020, T4: 2019, MI300X: 2023); figures given with sparsity are halved.
_T = 1e12
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("GB200", {"bf16": 2500 * _T, "fp16": 2500 * _T, "tf32": 1250 * _T, "fp32": 80 * _T}),
    ("B200", {"bf16": 2250 * _T, "fp16": 2250 * _T, "tf32": 1100 * _T, "fp32": 75 * _T}),
    ("GH200", {"bf16": 989 * _T, "fp16": 989 * _T, "tf32": 494 * _T, "fp32": 67 * _T}),
    ("H200 NVL", {"bf16": 835 * _T, "fp16": 835 * _T, "tf32": 417 * _T, "fp32": 60 * _T}),
    ("H200", {"bf16": 989 * _T, "fp16": 989 * _T, "tf32": 494 * _T, "fp32": 67 * _T}),
    ("H100 PCIe", {"bf16": 756 * _T, "fp16": 756 * _T, "tf32": 378 * _T, "fp32": 51 * _T}),
    ("H100 NVL", {"bf16": 835 * _T, "fp16": 835 * _T, "tf32": 417 * _T, "fp32": 60 * _T}),
    ("H100", {"bf16": 989 * _T, "fp16": 989 * _T, "tf32": 494 * _T, "fp32": 67 * _T}),
    ("A100", {"bf16": 312 * _T, "fp16": 312 * _T, "tf32": 156 * _T, "fp32": 19.5 * _T}),
    ("A40", {"bf16": 149.7 * _T, "fp16": 149.7 * _T, "tf32": 74.8 * _T, "fp32": 37.4 * _T}),
    ("A30", {"bf16": 165 * _T, "fp16": 165 * _T, "tf32": 82 * _T, "fp32": 10.3 * _T}),
    ("L40S", {"bf16": 362 * _T, "fp16": 362 * _T, "tf32": 183 * _T, "fp32": 91.6 * _T}),
    ("L4", {"bf16": 121 * _T, "fp16": 121 * _T, "tf32": 60 * _T, "fp32": 30.3 * _T}),
    ("V100-SXM2", {"fp16": 125 * _T, "fp32": 15.7 * _T}),
    ("V100-PCIE", {"fp16": 112 * _T, "fp32": 14 * _T}),
    ("T4", {"fp16": 65 * _T, "fp32": 8.1 * _T}),
    ("MI300X", {"bf16": 1307 * _T, "fp16": 1307 * _T, "fp32": 163 * _T}),
)


def peak_of(device_name: str, dtype: str) -> float | None:
    """Return the device's peak in FLOP/s for ``dtype`` (as in AMPConfig); None if unknown."""
    if " MIG " in device_name:
        return None  # A slice of a device, which has the name of the whole device.
    for name, peaks in _PEAKS:
        # As a whole word: an A10G is not an A10, and an L40 is not an L4.
        if re.search(rf"\b{name}\b", device_name):
            return peaks.get(dtype)
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
