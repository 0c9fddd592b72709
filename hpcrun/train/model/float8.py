"""Compute the matrix products of a model's layers in 8-bit floating point (fp8), through torchao.

torchao scales the inputs, the weights and the gradients of a layer with their largest values at each use
(dynamic scaling per tensor), and keeps no state between steps. Weights, their gradients and the optimizer's
state stay as they are.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

from hpcrun.errors import NotTrainable, UserError
from hpcrun.train.model.blocks import blocks

Float8 = Literal[True, False, "emulate"]
"""``emulate`` rounds to fp8 and multiplies in fp32, on any device."""

_KEY = "train.float8"
_MULTIPLE = 16
"""The GPUs' kernels take matrices whose sizes are multiples of it."""

_REFUSED = re.compile(rf"divisi?ble by {_MULTIPLE}")
"""Text of the kernels' refusal; torch misspells it for one of the two matrices."""


def to_float8(module: nn.Module, wanted: Float8) -> list[str]:
    """Let the layers of ``module`` compute in fp8, in place; return their names.

    The layers are each ``nn.Linear`` in a block (see ``blocks``), not of a subclass, with sizes that are
    multiples of 16. Output layers and embeddings outside the blocks keep their precision.

    Raises:
        UserError: torchao is missing, or the model has no such layer.
    """
    found = {
        name: part
        for block in blocks(module)
        for name, part in module.named_modules()
        if type(part) is nn.Linear and _within(part, block) and _fits(part)
    }
    if not found:
        raise UserError(
            f"{_KEY}: {type(module).__name__} has no nn.Linear with sizes that are multiples of {_MULTIPLE} "
            "in its blocks (elements of one class in an nn.ModuleList or nn.Sequential); set it to false"
        )
    convert, config = _torchao(emulate=wanted == "emulate")
    for part in found.values():
        _become(part, convert(part, config=config))
    return list(found)


@contextlib.contextmanager
def explain_sizes(wanted: Float8) -> Iterator[None]:
    """Replace a kernel's refusal of a number of tokens by NotTrainable, with a remedy."""
    try:
        yield
    except RuntimeError as error:
        if not wanted or not _REFUSED.search(str(error)):
            raise
        raise NotTrainable(
            f"{_KEY}: a layer in fp8 got a number of rows (samples x tokens of a micro-batch on a rank) that "
            f"is not a multiple of {_MULTIPLE} ({' '.join(str(error).split())}); change train.batch_size, "
            "train.micro_batch or the length of the samples, or set it to false"
        ) from error


def _torchao(*, emulate: bool) -> tuple[Any, Any]:
    """Return torchao's conversion and its options."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UserError(
            f"{_KEY}: needs the package torchao: `pip install hpcrun[float8]` ({error})"
        ) from error
    return convert_to_float8_training, Float8LinearConfig(emulate=emulate)


def _within(part: nn.Module, block: nn.Module) -> bool:
    return any(part is inner for inner in block.modules())


def _fits(part: nn.Linear) -> bool:
    return part.in_features % _MULTIPLE == 0 == part.out_features % _MULTIPLE


def _become(part: Any, converted: nn.Module) -> None:
    """Turn ``part`` into ``converted`` in place: its hooks stay, and so do all references to it."""
    for name, value in vars(converted).items():
        vars(part).setdefault(name, value)
    part.__class__ = type(converted)
