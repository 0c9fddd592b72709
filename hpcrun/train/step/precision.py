"""What ``amp.dtype`` means to torch on a device."""

import torch

from hpcrun.config import AMPConfig

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_HAS_TF32 = (8, 0)
"""The compute capability of Ampere, the first with TensorFloat-32."""


def autocast_dtype(amp: AMPConfig) -> torch.dtype | None:
    """What autocast computes in; None: it is off."""
    return _DTYPES.get(amp.dtype)


def choose_matmul(amp: AMPConfig, device: torch.device) -> None:
    """Let fp32 matrix products of the whole process run in TensorFloat-32, where that is asked for.

    By the one switch that torch 2.6 and 2.13 both have and its compiler reads: the newer
    ``torch.backends.cuda.matmul.fp32_precision`` may not be mixed with it.
    """
    if amp.dtype == "tf32" and device.type == "cuda":
        torch.set_float32_matmul_precision("high")


def shortfall(amp: AMPConfig, device: torch.device) -> str | None:
    """A line on what this device does instead of what was asked for, if it does."""
    if amp.dtype != "tf32":
        return None
    if device.type != "cuda":
        return "amp.dtype=tf32: that is a format of NVIDIA GPUs; here it computes in fp32"
    if torch.cuda.get_device_capability(device) < _HAS_TF32:
        name = torch.cuda.get_device_name(device)
        return f"amp.dtype=tf32: {name} has no TensorFloat-32; it computes in fp32"
    return None
