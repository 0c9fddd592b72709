"""A block's second pass, which recomputes its activations, kept from counting a batch twice.

What a block writes into its buffers (running statistics, the vectors of a spectral norm) is written again
when it runs again. The second pass finds them as the first did, and leaves them as the first left them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint, noop_context_fn

from hpcrun.errors import UserError

Contexts = tuple[
    contextlib.AbstractContextManager[Any],
    contextlib.AbstractContextManager[Any],
]

_SMALL = 1 << 16
"""Numbers in a buffer that is kept unasked: torch's kernel of a batch norm does not mark what it changes.
Masks and tables are larger, and constant in most models: of those only what is marked is kept."""


def keeping_buffers(block: nn.Module) -> Callable[..., Any] | None:
    """What recomputes ``block`` and keeps its buffers; None if it has none: torch's own will do."""
    return _recomputed if any(part._buffers for part in block.modules()) else None


def _recomputed(
    block: nn.Module,
    *arguments: Any,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    **options: Any,
) -> Any:
    """As torch's ``checkpoint``, whose ``context_fn`` it takes."""
    contexts = _Passes(block, context_fn)
    return checkpoint(block, *arguments, use_reentrant=False, context_fn=contexts, **options)


class _Passes:
    """The contexts of a first pass, and of those that recompute it."""

    def __init__(self, block: nn.Module, inner: Callable[[], Contexts]) -> None:
        self._parts = [part for part in block.modules() if part._buffers]
        self._inner = inner
        self._found: list[tuple[nn.Module, str, Tensor | None]] = []

    def __call__(self) -> Contexts:
        first, again = self._inner()
        return self._first(first), self._again(again)

    @contextlib.contextmanager
    def _first(self, inner: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        before = [
            (part, name, value, -1 if value is None else value._version, _copy(value))
            for part in self._parts
            for name, value in part._buffers.items()
        ]
        with inner:
            yield
        for part, name, value, version, copy in before:
            now = part._buffers.get(name)
            same = now is value and (now is None or now._version == version)
            if not same or (copy is not None and copy.numel() <= _SMALL):
                self._found.append((part, name, copy))

    @contextlib.contextmanager
    def _again(self, inner: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        left = [(part, dict(part._buffers)) for part in self._parts]
        for part, name, value in self._found:
            # A copy, as it may be wanted again, and not into the same tensor, which a gradient may need.
            part._buffers[name] = _copy(value)
        try:
            with inner:
                yield
        finally:  # Torch ends the pass by an exception, as soon as it has what it needs.
            for part, buffers in left:
                part._buffers.update(buffers)


class Buffers:
    """The buffers of the blocks of ``module`` that are recomputed as they are compiled, as these are now."""

    def __init__(self, module: nn.Module) -> None:
        self._found = [
            (block, name, value.detach().clone())
            for block in module.modules()
            if isinstance(block, CheckpointWrapper)
            for name, value in block._checkpoint_wrapped_module.named_buffers()
        ]

    def require_same(self) -> None:
        """Raise UserError if a forward pass has changed one of them since."""
        for block, name, value in self._found:
            inner = block._checkpoint_wrapped_module
            if not torch.equal(dict(inner.named_buffers())[name], value):
                raise UserError(
                    f"train.activation_checkpointing: {type(inner).__name__} changes its buffer {name} in "
                    "training, and compiled it may do so twice, or recompute with the changed one; set none, "
                    "or train.compile=false"
                )


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()
