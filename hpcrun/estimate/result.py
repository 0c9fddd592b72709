"""The memory of a rank, in parts. Imports no torch."""

import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcrun.config import Config
from hpcrun.errors import UserError


@dataclass(frozen=True)
class Traced:
    """A fake run: its settings, as resolved, and its memory in bytes.

    ``peak``: of the tensors on the GPU. ``parts``: weights, optimizer, average, and the rest at the peak
    (gradients, activations, gathered weights, buffers of collectives). ``flops``: of a sample, forward and
    backward, without recomputation; None if the model needs values. ``layers``: blocks of the model.
    ``shard``: of FSDP, full or hybrid. ``reshards``: FSDP frees gathered weights after the forward pass.
    ``reduces_each``: FSDP reduces gradients in each micro-batch. A sample has ``units`` of ``unit``, such as
    tokens. ``with_data``: false if there were no data, so that no activations are counted.
    """

    parallel: str
    ranks: int
    micro_batch: int
    accumulation: int
    parameters: int
    peak: int
    parts: Mapping[str, int]
    layers: int
    flops: float | None
    shard: str
    reshards: bool
    reduces_each: bool
    unit: str
    units: int
    with_data: bool = True


GIB = 1 << 30

MEMORY_GIB = {
    "v100-16": 15.8,
    "v100-32": 31.7,
    "rtx4090": 23.6,
    "l4": 22.0,
    "a10": 22.0,
    "a30": 23.6,
    "a40": 44.4,
    "a6000": 47.4,
    "l40s": 44.4,
    "a100-40": 39.4,
    "a100-80": 79.2,
    "h100": 79.2,
    "h100-nvl": 93.1,
    "gh200": 94.5,
    "h200": 139.7,
    "b200": 178.3,
    "mi250x": 63.9,
    "mi300x": 191.9,
    "mi325x": 255.9,
}
"""GiB that a process can use, slightly less than the nominal size; mi250x: one of its two dies."""

RESERVE_GIB = 2.0
"""GiB of a GPU that are not for tensors: CUDA's context, buffers of NCCL, workspaces of cuBLAS."""

FRAGMENTED = 0.05
"""Fraction of the tensors' memory that the allocator cannot use, because free blocks have the wrong sizes."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(GiB|GB|G)?", re.IGNORECASE)


def gpu_memory(name: str | None, size: str | None) -> int:
    """Return the bytes of the GPU ``name``, or of ``size`` such as 80GiB, 80GB or 80 (GiB).

    Raises:
        UserError: neither is given, the name is unknown, or the size is not a size.
    """
    if size is not None:
        found = _SIZE.fullmatch(size.strip())
        value = float(found[1]) if found else 0.0
        if found is None or value <= 0:
            raise UserError(f"--gpu-memory: {size} is not a size; write it as 80GiB")
        return int(value * (10**9 if (found[2] or "").lower() == "gb" else GIB))
    if name is None:
        raise UserError("estimate: name the GPU: --gpu h100, or --gpu-memory 80GiB")
    known = MEMORY_GIB.get(name.lower())
    if known is None:
        near = difflib.get_close_matches(name.lower(), MEMORY_GIB, n=1)
        hint = f"did you mean {near[0]}? Or" if near else f"one of {', '.join(MEMORY_GIB)}; or"
        raise UserError(f"--gpu: {name} is unknown; {hint} give its memory: --gpu-memory 80GiB")
    return int(known * GIB)


def needed(peak: int) -> int:
    """Return the bytes of GPU memory that a process with a peak of ``peak`` bytes of tensors needs."""
    return int(peak * (1 + FRAGMENTED) + RESERVE_GIB * GIB)


def gib(size: float) -> str:
    """Format ``size`` bytes in GiB."""
    return f"{size / GIB:.1f} GiB" if abs(size) >= GIB / 20 else f"{size / (1 << 20):.1f} MiB"


REFUSED = 2
"""Exit code of the process after it refused a config or a task."""


def estimate(config: Config, memory: int, gpu: str = "") -> dict[str, Any]:
    """Return the memory of a rank under ``config`` on GPUs named ``gpu`` of ``memory`` bytes.

    Raises:
        UserError: the config or its task cannot be estimated.
    """
    values = config.model_dump(mode="json")
    request = json.dumps({"config": values, "memory": memory, "gpu": gpu})
    done = subprocess.run(
        [sys.executable, "-m", "hpcrun.estimate"],
        input=request,
        stdout=subprocess.PIPE,
        text=True,
        # Hide the GPUs of this machine.
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        check=False,
    )
    if done.returncode not in (0, REFUSED):
        raise UserError(
            f"estimate: the fake run ended with exit code {done.returncode}; the lines above have the reason"
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    if done.returncode == REFUSED:
        raise UserError(answer["refused"])
    return answer
