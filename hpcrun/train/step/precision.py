"""Translate ``amp.dtype`` into torch settings, and compare precisions with the device."""

import torch

from hpcrun.config import AMPConfig
from hpcrun.devices import accelerator, vendor
from hpcrun.errors import UserError

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


def require_float8(device: torch.device) -> None:
    """Raise UserError unless ``device`` multiplies matrices in fp8."""
    if not vendor.has_float8(device):
        name = "the CPU" if device.type == "cpu" else accelerator.name(device)
        raise UserError(
            f"train.float8: {name} has no matrix products in fp8 (NVIDIA GPUs have them from compute "
            "capability 8.9, AMD's from MI300); set it to false, or to emulate for a test without speed"
        )


def shortfall(amp: AMPConfig, device: torch.device) -> str | None:
    """Return a note if the device lacks the requested precision, else None."""
    if amp.dtype != "tf32" or vendor.has_tf32(device):
        return None
    if device.type != vendor.KIND:
        return "amp.dtype=tf32: only NVIDIA GPUs have this format; this device computes in fp32"
    name = accelerator.name(device)
    return f"amp.dtype=tf32: {name} has no TensorFloat-32; it computes in fp32"
