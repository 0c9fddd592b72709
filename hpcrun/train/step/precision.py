"""Translate ``amp.dtype`` into torch settings, and compare precisions with the device."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpcrun.config import AMPConfig
from hpcrun.devices import accelerator, vendor
from hpcrun.train.step.gate import StepDecision
from hpcrun.train.step.weighting import Weight

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_dtype(amp: AMPConfig) -> torch.dtype | None:
    """Return the dtype for autocast; None if autocast is off."""
    return _DTYPES.get(amp.dtype)


def choose_matmul(amp: AMPConfig, device: torch.device) -> None:
    """Allow TensorFloat-32 in the whole process if ``amp`` is tf32, and forbid it if ``amp`` is fp32."""
    if amp.dtype == "tf32":
        vendor.allow_tf32(device)
    elif amp.dtype == "fp32":
        vendor.forbid_tf32(device)


def faster(amp: AMPConfig, device: torch.device) -> str | None:
    """Return a hint if the device has a much faster precision than fp32, else None."""
    if amp.dtype != "fp32" or not vendor.has_bf16(device):
        return None
    return (
        f"amp.dtype=fp32: {accelerator.name(device)} computes many times faster in bf16; set amp.dtype=bf16, "
        "or tf32 to keep fp32 outside matrix products and convolutions"
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with every tensor on ``device``; dicts, lists, tuples and dataclasses are traversed.

    An object with its own ``to`` method moves itself: a PackedSequence keeps a part on the CPU, and some
    subclasses of dict or tuple hold more than their items.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    kind = type(batch)
    if kind is list or kind is tuple:
        return kind([to_device(value, device) for value in batch])
    if kind is not dict and callable(getattr(batch, "to", None)):
        # Some ``to`` methods work in place, and counting FLOPs moves the batch to the meta device.
        own = copy.copy(batch)
        moved = own.to(device)
        return own if moved is None else moved
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return kind(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return kind(to_device(value, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(moved, field.name, to_device(getattr(batch, field.name), device))
        return moved
    return batch


LossFunction = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of an optimizer step. Tensors are on the device, so that reading one waits for the device.

    Attributes:
        loss: this rank's mean loss, float32 of shape (). In a weighted step it is this rank's contribution:
            the mean over ranks is the weighted mean.
        gradient_norm: global 2-norm before clipping, shape (); None without clipping.
        decision: decision on the step; see :attr:`skipped`.
        learning_rate: used in this step by the first parameter group.
        weights: the weights of the micro-batches, as the caller gave them.
        updated: False between the calls of an accumulation (``accumulation_steps``), which change no weight.

    ``float(result)``, ``result.item()``, ``str(result)`` and ``f"{result:.4f}"`` give the loss.
    """

    loss: Tensor
    gradient_norm: Tensor | None
    decision: StepDecision
    learning_rate: float
    weights: Sequence[Weight] = ()
    updated: bool = True

    def __float__(self) -> float:
        return float(self.loss)

    def item(self) -> float:
        """Return the loss as a number; waits for the device."""
        return float(self)

    def __format__(self, form: str) -> str:
        return format(float(self), form)

    def __str__(self) -> str:
        return str(float(self))

    @property
    def skipped(self) -> bool:
        """True if a gradient was not finite, so that nothing changed. May wait for the device."""
        return self.decision.skipped
