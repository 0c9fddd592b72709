"""Prepare a model before it is wrapped: activation checkpointing, compilation.

FSDP compiles blocks before it shards them, DDP after wrapping.
The names in a checkpoint do not depend on the preparation.

Find the blocks of a model: the units of FSDP, activation checkpointing and compilation.

Blocks are elements of the model's lists (``nn.ModuleList``, ``nn.Sequential``, ``nn.ModuleDict``) if their
class occurs in the list more than once, or if it is the only class in the list: a transformer's layers, a
ResNet's bottlenecks. Elements without parameters (activations) are not blocks, and blocks do not nest. An
embedding is no block: its matrix is often the output's too (``F.linear(x, embedding.weight)``).

A norm would update its running statistics again when its activations are recomputed, so activation
checkpointing refuses blocks with such norms.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hpcrun.devices.vendor import CompileMode
from hpcrun.errors import UserError

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``module``, each once, in the order of declaration."""
    found: dict[int, nn.Module] = {}
    _collect(module, found)
    return list(found.values())


def kind(module: nn.Module) -> type[nn.Module]:
    """Return the module's class; for a checkpointed module, the class of the wrapped module."""
    inner = module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else module
    return type(inner)


def unshared(root: nn.Module, parts: list[nn.Module]) -> list[nn.Module]:
    """Return the ``parts`` without tied weights: no other module has their parameters."""
    separate = has_own_weights(root)
    return [part for part in parts if separate(part)]


def has_own_weights(root: nn.Module) -> Callable[[nn.Module], bool]:
    """Return a predicate: True if no module outside of a part has the part's parameters."""
    uses: Counter[int] = Counter()
    for part in root.modules():
        uses.update(id(p) for p in part._parameters.values() if p is not None)

    def own(part: nn.Module) -> bool:
        inside: Counter[int] = Counter()
        for inner in part.modules():
            inside.update(id(p) for p in inner._parameters.values() if p is not None)
        return all(uses[key] == count for key, count in inside.items())

    return own


def _collect(module: nn.Module, found: dict[int, nn.Module]) -> None:
    classes: Counter[type[nn.Module]] = Counter()
    if isinstance(module, _LISTS):
        classes.update(kind(child) for child in module._modules.values() if child is not None)
    for child in module.children():
        same_class = len(classes) == 1
        repeated = (same_class or classes[kind(child)] > 1) and kind(child) not in EMBEDDINGS
        if repeated and next(child.parameters(), None) is not None:
            found.setdefault(id(child), child)
        else:
            _collect(child, found)


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
    """Options for a model before it is wrapped: activation checkpointing, compilation.

    A block is an element of an ``nn.ModuleList`` or ``nn.Sequential`` of modules of one class.

    Attributes:
        checkpointing: the activations that the backward pass recomputes, to save memory. ``full``: those of
            every block; ``selective``: of every block, except for
            the results of matrix products, convolutions and attention. Sources: ``torch.utils.checkpoint``;
            Chen et al. 2016, arXiv:1604.06174.
        compile: mode of ``torch.compile``; None: no compilation.
    """

    checkpointing: Literal["none", "full", "selective"] = "none"
    compile: CompileMode | None = None


def prepare(module: nn.Module, wanted: Preparation) -> None:
    """Set activation checkpointing in place; the strategy compiles later.

    Raises:
        UserError: the model has no blocks to checkpoint, or blocks with running statistics.
    """
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


def _checkpoint_activations(module: nn.Module, wanted: Preparation) -> None:
    found = blocks(module)
    if not found:
        raise UserError(
            f"train.activation_checkpointing: {type(module).__name__} has no blocks (elements of one class "
            "in an nn.ModuleList or nn.Sequential); put its layers into one, or set none"
        )
    for part in (inner for block in found for inner in block.modules()):
        # The first step sets a model in evaluation mode, as libraries load it, to training mode.
        trains = part.training or not module.training
        if isinstance(part, _NormBase) and part.track_running_stats and trains:
            raise UserError(
                f"train.activation_checkpointing: {type(part).__name__} in a block would update its running "
                "statistics twice in a step; set none"
            )
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
