"""Prepare a model before it is wrapped: layout, fp8 layers, activation checkpointing, compilation.

The order is torch's: layout, fp8, activation checkpointing, compilation. FSDP compiles blocks before it
shards them. DDP compiles the whole model after wrapping, so that the graph is split where DDP's buckets end.
The names in a checkpoint do not depend on the preparation.

torchao scales the inputs, the weights and the gradients of a layer with their largest values at each use
(dynamic scaling per tensor), and keeps no state between steps. Weights, their gradients and the optimizer's
state stay as they are.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hpcrun.devices.vendor import CompileMode
from hpcrun.errors import NotTrainable, UserError
from hpcrun.train.model.blocks import blocks, kind

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


_aten: Any = torch.ops.aten
# Matrix products and attention take most of a forward pass; recomputing the rest is cheap.
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
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_scaled_mm",
        "_scaled_grouped_mm",
        "_grouped_mm",
    )
    if hasattr(_aten, name)
)
# Attention of other libraries: FlashAttention 2 and 3, xFormers, Transformer Engine; flex_attention of torch.
_COSTLY_ELSEWHERE = re.compile(
    r"(flash_attn|xformers|transformer_engine).*(fwd|forward)|flex_attention$"
)


@dataclass(frozen=True)
class Preparation:
    """Options for a model before it is wrapped: memory layout, activation checkpointing, compilation.

    A block is an element of an ``nn.ModuleList`` or ``nn.Sequential`` of modules of one class.

    Attributes:
        checkpointing: the activations that the backward pass recomputes, to save memory. ``full``: those of
            every block; ``every``: of every ``every``-th block; ``selective``: of every block, except for
            the results of matrix products, convolutions and attention. Sources: ``torch.utils.checkpoint``;
            Chen et al. 2016, arXiv:1604.06174.
        every: number of blocks from one checkpointed block to the next.
        compile: mode of ``torch.compile``; None: no compilation.
        channels_last: store 4-dimensional weights as NHWC (``torch.channels_last``).
        float8: compute the layers of the blocks in fp8 through ``torchao``.
    """

    checkpointing: Literal["none", "full", "every", "selective"] = "none"
    every: int = 2
    compile: CompileMode | None = None
    channels_last: bool = False
    float8: Float8 = False


def prepare(module: nn.Module, wanted: Preparation) -> None:
    """Set the layout, fp8 layers and activation checkpointing in place; the strategy compiles later.

    Raises:
        UserError: the model has no blocks to checkpoint or no layers for fp8, torchao is missing, or
            recomputation would change the training.
    """
    if wanted.channels_last:
        # Only weights with 4 dimensions: a convolution's output takes the layout of its weight.
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if wanted.float8:
        to_float8(module, wanted.float8)
    if wanted.checkpointing != "none":
        _checkpoint_activations(module, wanted)


def compile_in_place(part: nn.Module, **how: Any) -> None:
    """Compile calls of ``part`` and keep its class and names; ``how``: arguments of ``torch.compile``."""
    if not of_torch(part):
        part.compile(**how)
        return
    # torch.compile caches by code object, so each part gets a separate code object.
    inner = part.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        return inner(*arguments, **options)

    code = forward.__code__.replace(co_name=f"forward_{id(part):x}")
    own = FunctionType(code, forward.__globals__, code.co_name, None, forward.__closure__)
    part.forward = torch.compile(own, **how)


def of_torch(part: nn.Module) -> bool:
    """Return True for a class from torch.nn (e.g. nn.Sequential): torch.compile skips calls of these."""
    return type(part).__module__.startswith("torch.nn.")


def why_not_recomputed(module: nn.Module, *, every: int = 1) -> str | None:
    """Return why ``module`` cannot be trained with activation checkpointing; None if it can.

    ``every``: checkpoint each block whose number is a multiple of it.
    """
    found = blocks(module)
    if not found:
        return (
            f"train.activation_checkpointing: {type(module).__name__} has no blocks (elements of one class "
            "in an nn.ModuleList or nn.Sequential); put its layers into one, or set none"
        )
    for block in found[::every]:
        if any(
            isinstance(part, _NormBase) and part.track_running_stats for part in block.modules()
        ):
            return (
                f"train.activation_checkpointing: {kind(block).__name__} has running statistics, "
                "which a recomputed block would update twice; set none"
            )
    return None


def _checkpoint_activations(module: nn.Module, wanted: Preparation) -> None:
    every = wanted.every if wanted.checkpointing == "every" else 1
    refusal = why_not_recomputed(module, every=every)
    if refusal is not None:
        raise UserError(refusal)
    found = blocks(module)[::every]
    options: dict[str, Any] = {}
    if wanted.checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_costly)
    chosen = {id(block): checkpoint_wrapper(block, **options) for block in found}
    _replace(module, lambda part: chosen.get(id(part)))


def keep_costly(_context: Any, operation: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    """Return torch's policy for a result: keep products of matrices and attention, recompute the rest."""
    return CheckpointPolicy.MUST_SAVE if _costly(operation) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _costly(operation: Any) -> bool:
    return operation in _COSTLY or _COSTLY_ELSEWHERE.match(operation.name()) is not None


def _replace(module: nn.Module, other: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace each submodule for which ``other`` returns a module, everywhere in ``module``."""
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        if (new := other(child)) is not None:
            module._modules[name] = new
        else:
            _replace(child, other)


def synchronized(model: Any, *, ranks: int, on_gpu: bool) -> Any:
    """Return ``model`` with every BatchNorm replaced, or unchanged if that is not possible.

    Weights, buffers, their names and ``requires_grad`` stay. Anything but a module is returned unchanged.
    """
    if not isinstance(model, nn.Module) or ranks == 1:
        return model
    if why_not_synchronized(model, ranks=ranks, on_gpu=on_gpu) is not None:
        return model
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]


def why_not_synchronized(model: Any, *, ranks: int, on_gpu: bool) -> str | None:
    """Return a line if ``train.sync_batchnorm`` has no effect on several ranks; else None."""
    key = "train.sync_batchnorm"
    if not isinstance(model, nn.Module) or ranks == 1:
        return None
    if not any(isinstance(part, _BatchNorm) for part in model.modules()):
        return f"{key}: has no effect: the model has no BatchNorm"
    if not on_gpu:
        return (
            f"{key}: has no effect on the CPU, where torch has no SyncBatchNorm: each rank uses the "
            "statistics of only its samples"
        )
    return None
