"""Comparison of hardware, library versions and variables with those recorded in a checkpoint.

A requeued job may start on other GPUs, or find another version of torch or NCCL. The training continues, but
floating-point sums may round differently, so the last bits of the weights may differ.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hpcrun.config import differing
from hpcrun.devices import accelerator, vendor
from hpcrun.errors import NotSameBits
from hpcrun.ranks.collective import Ranks
from hpcrun.run.endings import node_name

ON_GPUS = (
    "CUBLAS_WORKSPACE_CONFIG",
    "HIPBLASLT_ALLOW_TF32",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "RCCL_MSCCLPP_ENABLE",
    "RCCL_MSCCLPP_FORCE_ENABLE",
    "RCCL_MSCCLPP_THRESHOLD",
    "RCCL_MSCCL_ENABLE",
    "RCCL_MSCCL_ENABLE_SINGLE_PROCESS",
    "RCCL_MSCCL_FORCE_ENABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_BLAS_PREFER_HIPBLASLT",
)
"""Environment variables that choose a kernel or its precision, or the order of a sum over ranks.

RCCL, AMD's NCCL, reads NCCL's variables too; its own replace NCCL's algorithms by those of MSCCL.
"""

ON_CPUS = (
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
)
"""Environment variables that choose kernels of oneDNN and MKL."""

NOT_SET = "none"
"""The recorded value of a variable that is not set."""

_CPU_MODEL = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE)


def environment(device: torch.device, ranks: Ranks) -> dict[str, str]:
    """Return the environment of all ranks, the same on every rank. Collective.

    Keys: ``device`` (name of the GPU, or the CPU's model), ``capability`` (of the GPU, or the instruction
    set that torch uses on the CPU), ``threads`` (CPU only), ``torch``, ``cuda`` or ``hip``,
    ``cudnn``, ``nccl``, ``torchao`` (with fp8), ``ranks``, ``ranks_per_node`` (GPUs only), and those of
    ``ON_GPUS`` or ``ON_CPUS``, with ``NOT_SET`` for those that are not set.

    Args:
        ranks: all ranks, with a control group.
    """
    wanted = ON_CPUS if device.type == "cpu" else ON_GPUS
    own = _own(device) | libraries(device) | variables(os.environ, wanted)
    everywhere = ranks.gather((node_name(), own))
    return of_ranks(everywhere, gpus=device.type != "cpu")


def of_ranks(ranks: list[tuple[str, dict[str, str]]], *, gpus: bool) -> dict[str, str]:
    """Return the environment of ranks, each with its node and its own values."""
    found = {"ranks": str(len(ranks))}
    if gpus:
        # Gloo's order of addition depends on the number of ranks only.
        on_node = Counter(node for node, _ in ranks)
        found["ranks_per_node"] = _values([str(count) for count in on_node.values()])
    for key in {key for _, values in ranks for key in values}:
        found[key] = _values([values.get(key, NOT_SET) for _, values in ranks])
    return dict(sorted(found.items()))


def changed(meta: Mapping[str, Any], now: Mapping[str, str]) -> list[str]:
    """Return what decides bits and differs from the checkpoint with ``meta``: ``device: A100 -> H100``.

    What the checkpoint does not record counts as unchanged.
    """
    before: dict[str, str] = dict(meta.get("environment", {}))
    return differing(before, {key: now.get(key, NOT_SET) for key in before})


def require_same(lines: list[str], step: int) -> None:
    """Raise NotSameBits if ``lines`` names anything that has changed since ``step`` was saved."""
    if lines:
        raise NotSameBits(
            f"train.deterministic=strict: different from when step {step} was saved: {'; '.join(lines)}; "
            "restore what was there (job.gpu_type, job.constraint, job.setup, the number of nodes), or "
            "accept other last bits: repeat the command of this run with train.deterministic=true"
        )


def libraries(device: torch.device) -> dict[str, str]:
    """Return the versions of torch and of the libraries that compute on ``device``."""
    found = {"torch": str(torch.__version__)}
    if "torchao" in sys.modules:  # Only train.float8 imports it.
        found["torchao"] = str(sys.modules["torchao"].__version__)
    return found if device.type == "cpu" else {**found, **vendor.libraries()}


def variables(environ: Mapping[str, str], wanted: Iterable[str]) -> dict[str, str]:
    """Return the values of the ``wanted`` variables; ``NOT_SET`` for those that are not set or empty."""
    return {name: environ.get(name) or NOT_SET for name in wanted}


def _own(device: torch.device) -> dict[str, str]:
    """Return the values of this rank's device."""
    if device.type == "cpu":
        return {
            "device": _cpu_model(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
        }
    return {"device": accelerator.name(device), **vendor.capability(device)}


def _cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's model, or its architecture where the kernel does not name the model (ARM)."""
    try:
        found = _CPU_MODEL.search(path.read_text())
    except OSError:
        found = None
    return found[1] if found else os.uname().machine


def _values(values: list[str]) -> str:
    """Return the value of all ranks; of several values, each with its number: ``A100 x 4, H100 x 4``."""
    counts = Counter(values)
    if len(counts) == 1:
        return values[0]
    return ", ".join(f"{value} x {count}" for value, count in sorted(counts.items()))
