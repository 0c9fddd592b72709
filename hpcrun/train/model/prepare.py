"""What is done to a model before ranks share it: layout of images, recomputed activations, compilation.

The order is torch's: layout, then activation checkpointing, then compilation: of the blocks before they
are sharded, but of the whole after DDP has wrapped it, so that the graph is cut where DDP's buckets end.
Nothing of it shows in the names in a checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hpcrun.errors import UserError
from hpcrun.train.model.activation_checkpointing import keeping_buffers
from hpcrun.train.model.blocks import blocks

CompileMode = Literal["default", "reduce-overhead", "max-autotune"]

_aten: Any = torch.ops.aten
# Products of matrices and attention take the time of a forward pass; all else is cheap to do again.
_COSTLY = frozenset(
    getattr(_aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(_aten, name)
)


@dataclass(frozen=True)
class Preparation:
    """What to do to a model before it is trained; by default nothing.

    ``checkpointing``: whose activations are recomputed in the backward pass: ``full``: of every block (see
    ``blocks``), ``every``: of every ``every``-th, ``selective``: of every block, but for the results of
    matrix products, convolutions and attention. ``compile``: the mode of ``torch.compile``, or None.
    """

    checkpointing: Literal["none", "full", "every", "selective"] = "none"
    every: int = 2
    compile: CompileMode | None = None
    channels_last: bool = False


def prepare(module: nn.Module, wanted: Preparation) -> None:
    """Lay out and wrap the parts of ``module`` in place; compiling is left to how it is shared.

    Raises:
        UserError: there is nothing to checkpoint, or its recomputation would change what is learnt.
    """
    if wanted.channels_last:
        # Only weights with 4 dimensions: a convolution takes over the layout of its weight.
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if wanted.checkpointing != "none":
        _checkpoint_activations(module, wanted)


def compile_in_place(part: nn.Module, **how: Any) -> None:
    """Have calls of ``part`` compiled, its class and its names being kept; ``how`` is torch.compile's."""
    if not of_torch(part):
        part.compile(**how)
        return
    # The compiler keeps what it compiles by code object: each part gets a frame, and that a code, of its own.
    inner = part.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        return inner(*arguments, **options)

    code = forward.__code__.replace(co_name=f"forward_{id(part):x}")
    own = FunctionType(code, forward.__globals__, code.co_name, None, forward.__closure__)
    part.forward = torch.compile(own, **how)


def of_torch(part: nn.Module) -> bool:
    """Whether its class is one of torch's (nn.Sequential, say), in whose calls the compiler does not look."""
    return type(part).__module__.startswith("torch.nn.")


def _checkpoint_activations(module: nn.Module, wanted: Preparation) -> None:
    found = blocks(module)
    if not found:
        raise UserError(
            f"train.activation_checkpointing: {type(module).__name__} has no blocks, which are elements of "
            "one class in an nn.ModuleList or nn.Sequential; put its layers into one, or set none"
        )
    if wanted.checkpointing == "every":
        found = found[:: wanted.every]
    for block in found:
        if wanted.compile and any(_has_statistics(part) for part in block.modules()):
            raise UserError(
                f"train.activation_checkpointing: {type(block).__name__} holds running statistics, "
                "which a compiled block may write twice; set none, or train.compile=false"
            )
    options: dict[str, Any] = {}
    if wanted.checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_costly)
    chosen = {
        # A compiled block hides its buffers; `Buffers` (activation_checkpointing.py) keeps them.
        id(block): checkpoint_wrapper(
            block, checkpoint_fn=None if wanted.compile else keeping_buffers(block), **options
        )
        for block in found
    }
    _replace(module, lambda part: chosen.get(id(part)))


def _has_statistics(part: nn.Module) -> bool:
    return isinstance(part, _NormBase) and part.track_running_stats


def _keep_costly(_context: Any, operation: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    costly = operation in _COSTLY
    return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE


def _replace(module: nn.Module, other: Callable[[nn.Module], nn.Module | None]) -> None:
    """Put ``other`` of each part that has one in its place, wherever it is used."""
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        if (new := other(child)) is not None:
            module._modules[name] = new
        else:
            _replace(child, other)
