"""Seeds, what train.deterministic asks of torch, and what is said where a kernel cannot give it.

Torch names the kernel that it refuses, and not the key that asked for the refusal.
"""

import contextlib
import os
import random
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.utils.deterministic

from hpcrun.errors import UserError
from hpcrun.train.errors import NotDeterministic

_REFUSED = re.compile(r"(?P<kernel>\w[\w ]*) does not have a deterministic implementation, but")
_PLACE = re.compile(r'^ *File "([^"\n]+)", line (\d+)', re.MULTILINE)
_CUBLAS = "not deterministic because it uses CuBLAS"
_REMEDY = (
    "or accept other last bits after an interruption: train.deterministic=warn with the command of "
    "this run, which it then goes on with"
)
_TORCH, _OURS = (f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parent))


def seed_alike(seed: int) -> None:
    """Seed every generator that a dataset or a model may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_rank(seed: int, rank: int, step: int) -> None:
    """Generators of a rank that has none to restore: a function of where it stands, and of nothing else."""
    mixed = np.random.SeedSequence([seed, rank, step]).generate_state(2, np.uint32)
    seed_alike(int(mixed[0]) << 31 ^ int(mixed[1]))


def choose_kernels(wanted: Literal[True, False, "warn"]) -> None:
    """Let this process compute as train.deterministic says; to be called before it uses a GPU.

    Only where torch raises is attention's backward pass deterministic, and cuDNN's attention left alone:
    where it warns, it keeps the faster ones.
    """
    if wanted:
        # cuBLAS reads it when it is first used, and older torch refuses cuBLAS without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted is not False, warn_only=wanted == "warn")
    # Else all memory that is taken would first be filled, so that a kernel that reads what nobody has
    # written reads the same: bits depend on that only where a kernel is wrong, and every step pays for it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextlib.contextmanager
def refusals_told() -> Iterator[None]:
    """Let torch's refusal of a kernel in the block say what to do; raises :class:`NotDeterministic`."""
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
            f"train.deterministic: CUBLAS_WORKSPACE_CONFIG is {found!r}, and cuBLAS repeats itself only with "
            f":4096:8 or :16:8; leave the variable out, {_REMEDY}"
        )
    return None


def _called_at(error: Exception) -> str:
    """The innermost line that is neither torch's nor ours; none where the backward pass came to it."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    # A loader process's traceback is in the text, and so is the line that the compiler was at.
    for file, line in reversed([*frames, *_PLACE.findall(str(error))]):
        if file.startswith(_OURS):
            break
        if not file.startswith((_TORCH, "<")):
            return f", called at {file}:{line}"
    return ""
