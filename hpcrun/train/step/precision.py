"""Translate ``amp.dtype`` into torch settings."""

import torch

from hpcrun.config import AMPConfig

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_HAS_TF32 = (8, 0)
"""Compute capability of Ampere, the first architecture with TensorFloat-32."""


def autocast_dtype(amp: AMPConfig) -> torch.dtype | None:
    """Return the dtype for autocast; None if autocast is off."""
    return _DTYPES.get(amp.dtype)


def choose_matmul(amp: AMPConfig, device: torch.device) -> None:
    """Allow TensorFloat-32 for the fp32 matrix products of the whole process, if ``amp`` asks for it.

    Uses the one switch that torch 2.6 and 2.13 both have and torch.compile reads. Torch refuses to mix it
    with the newer ``torch.backends.cuda.matmul.fp32_precision``.
    """
    if amp.dtype == "tf32" and device.type == "cuda":
        torch.set_float32_matmul_precision("high")


def shortfall(amp: AMPConfig, device: torch.device) -> str | None:
    """Return a note if the device lacks the requested precision, else None."""
    if amp.dtype != "tf32":
        return None
    if device.type != "cuda":
        return "amp.dtype=tf32: only NVIDIA GPUs have this format; this device computes in fp32"
    if torch.cuda.get_device_capability(device) < _HAS_TF32:
        name = torch.cuda.get_device_name(device)
        return f"amp.dtype=tf32: {name} has no TensorFloat-32; it computes in fp32"
    return None
