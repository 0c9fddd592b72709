"""Set seeds and deterministic kernels, and explain torch's refusal of a kernel.

Torch's error names the refused kernel, but not the config key that asked for it.
"""

import contextlib
import os
import random
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.utils.deterministic

from hpcrun.devices import vendor
from hpcrun.errors import NotDeterministic, UserError

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
_CUBLAS = "not deterministic because it uses CuBLAS"
_REMEDY = (
    "or accept different last bits after an interruption: repeat the command of this run with "
    "train.deterministic=warn to resume it"
)
_TORCH, _OURS = (f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parent))


def seed_alike(seed: int) -> None:
    """Seed every generator that a dataset or a model may use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_rank(seed: int, rank: int, step: int) -> None:
    """Seed a rank that has no generators to restore, from seed, rank and step only."""
    _seed_mixed(seed, rank, step)


def seed_for_optimizer(seed: int) -> None:
    """Seed all ranks alike for ``Task.build_optimizer``, whatever has drawn before.

    A deferred build leaves other generators than a normal build, and so does a resume.
    """
    _seed_mixed(seed, _NO_RANK, 0)


def seed_for_datasets(seed: int) -> None:
    """Seed all ranks alike for the task's datasets; see :func:`seed_for_optimizer`."""
    _seed_mixed(seed, _NO_RANK, 1)


def _seed_mixed(*words: int) -> None:
    mixed = np.random.SeedSequence(words).generate_state(2, np.uint32)
    seed_alike(int(mixed[0]) << 31 ^ int(mixed[1]))


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
    """Print a line if the user gave other values to variables of ``NCCL_ORDER``; hpcrun keeps these."""
    if wanted not in (True, "strict"):
        return
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
    text = str(error)
    refused = _REFUSED.search(text)
    if refused:
        return (
            f"train.deterministic: torch has no deterministic implementation of {refused['kernel']}"
            f"{_called_at(error)}; use another operation, {_REMEDY}"
        )
    if _CUBLAS in text:
        found = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        return (
            f"train.deterministic: CUBLAS_WORKSPACE_CONFIG is {found!r}, but cuBLAS is deterministic only "
            f"with :4096:8 or :16:8; unset the variable, {_REMEDY}"
        )
    return None


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
