"""The causes of the last bits: seeds, deterministic kernels, and the environment that a checkpoint records.

A requeued job may start on other GPUs, or find another version of torch or NCCL. The training continues, but
floating-point sums may round differently, so the last bits of the weights may differ.
"""

import contextlib
import os
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import torch.utils.deterministic

from hpcrun.checkpoint.state.generators import seed_all_from
from hpcrun.config import differing
from hpcrun.devices import accelerator, vendor
from hpcrun.errors import NotDeterministic, NotSameBits, UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.run.endings import node_name

Deterministic = Literal[True, False, "warn", "strict"]

NCCL_ORDER = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
"""Variables with which NCCL adds over ranks in an order that only topology and number of ranks decide.

Sums in switches (NVLS, CollNet) may differ between two calls (https://github.com/NVIDIA/nccl/issues/1497).
Only Ring exists for every collective; NCCL since 2.24 fails at a collective without an algorithm.
"""

_NO_RANK = 2**31

_REFUSED = re.compile(r"(?P<kernel>\w[\w ]*) does not have a deterministic implementation, but")
_PLACE = re.compile(r'^ *File "([^"\n]+)", line (\d+)', re.MULTILINE)
_REMEDY = (
    "or accept different last bits after an interruption: repeat the command of this run with "
    "train.deterministic=warn to resume it"
)
_TORCH, _OURS = (f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parent))


def seed_rank(seed: int, rank: int, step: int) -> None:
    """Seed a rank that has no generators to restore, from seed, rank and step only."""
    seed_all_from(seed, rank, step)


def seed_for_optimizer(seed: int) -> None:
    """Seed all ranks alike for ``Task.build_optimizer``, whatever has drawn before.

    A deferred build leaves other generators than a normal build, and so does a resume.
    """
    seed_all_from(seed, _NO_RANK, 0)


def seed_for_datasets(seed: int) -> None:
    """Seed all ranks alike for the task's datasets; see :func:`seed_for_optimizer`."""
    seed_all_from(seed, _NO_RANK, 1)


def choose_kernels(wanted: Deterministic) -> None:
    """Choose deterministic or fast kernels for this process; call this before using a GPU or NCCL.

    The choice calls ``torch.use_deterministic_algorithms`` and sets variables of cuBLAS and NCCL in the
    environment, but replaces no value of yours. Sources: the page "Reproducibility" of torch's documentation,
    and "Environment Variables" of NCCL's.

    Args:
        wanted: the value of ``train.deterministic``. True, "strict": deterministic kernels only, and NCCL
            adds over ranks in one order. "warn": torch warns of other kernels, and NCCL is free. False: any
            kernel.
    """
    if wanted in (True, "strict"):
        # NCCL reads the variables when it makes its first group.
        for name, value in NCCL_ORDER.items():
            os.environ.setdefault(name, value)
    if wanted:
        vendor.fix_workspace()
    torch.use_deterministic_algorithms(wanted is not False, warn_only=wanted == "warn")
    # By default torch would fill all new memory, so that a kernel that reads uninitialized memory gives the
    # same result. That matters only for a wrong kernel, and every step pays for it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def fix_compiler(wanted: Deterministic, mode: str) -> None:
    """Let torch.compile choose kernels without measuring them, if ``wanted`` is True or "strict".

    Older torch has no switch for all measurements. There, it measures in every mode whether to pad matrix
    products, and many kernels in the modes max-autotune.

    Raises:
        UserError: ``mode`` measures, and this torch cannot turn that off.
    """
    if wanted not in (True, "strict"):
        return
    from torch._inductor import config

    options: Any = config
    if hasattr(options, "deterministic"):
        options.deterministic = True
        return
    if mode.startswith("max-autotune"):
        raise UserError(
            f"train.compile_mode: {mode} measures kernels and takes the fastest, which may change the last "
            f"bits; torch {torch.__version__} cannot turn this off for train.deterministic; use another "
            "mode, or train.deterministic=false"
        )
    options.shape_padding = False


def announce_order(wanted: Deterministic) -> None:
    """Print what deterministic kernels cost, and variables of ``NCCL_ORDER`` with the user's values."""
    if wanted not in (True, "strict"):
        return
    print(
        "hpcrun: train.deterministic: equal bits after interruptions cost speed (attention, compiled "
        "kernels, on several nodes NCCL's algorithms); docs/benchmarks.md says how to measure it, and "
        "train.deterministic=false switches it off",
        flush=True,
    )
    kept = {name: os.environ.get(name, value) for name, value in NCCL_ORDER.items()}
    other = {name: value for name, value in kept.items() if value != NCCL_ORDER[name]}
    if other:
        theirs = " ".join(f"{name}={value}" for name, value in other.items())
        ours = " ".join(f"{name}={NCCL_ORDER[name]}" for name in other)
        print(
            f"hpcrun: train.deterministic: {theirs}, as set in the environment, instead of {ours}: NCCL may "
            "add over ranks in another order after an interruption",
            flush=True,
        )


@contextlib.contextmanager
def explain_refusals() -> Iterator[None]:
    """Replace torch's refusal of a kernel by :class:`NotDeterministic`, with a remedy."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        line = _line(error)
        if line is None:
            raise
        raise NotDeterministic(line) from None


def _line(error: Exception) -> str | None:
    refused = _REFUSED.search(str(error))
    if refused is None:
        return None
    return (
        f"train.deterministic: torch has no deterministic implementation of {refused['kernel']}"
        f"{_called_at(error)}; use another operation, {_REMEDY}"
    )


def _called_at(error: Exception) -> str:
    """Return the innermost line outside torch and hpcrun; empty if the backward pass called the kernel."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    # The text contains a loader process's traceback, and the line that the compiler was at.
    for file, line in reversed([*frames, *_PLACE.findall(str(error))]):
        if file.startswith(_OURS):
            break
        if not file.startswith((_TORCH, "<")):
            return f", called at {file}:{line}"
    return ""


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
    ``cudnn``, ``nccl``, ``ranks``, ``ranks_per_node`` (GPUs only), and those of
    ``ON_GPUS`` or ``ON_CPUS``, with ``NOT_SET`` for those that are not set.
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
