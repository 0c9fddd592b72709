"""A block's second pass, which recomputes its activations, kept from counting a batch twice.

What a block writes into its buffers (running statistics, the vectors of a spectral norm) is written again
when it runs again. The second pass finds them as the first did, and leaves them as the first left them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint, noop_context_fn

from hpcrun.train.errors import NotTrainable

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
        return self._first(first), _Anew(lambda: self._again(again))

    @contextlib.contextmanager
    def _first(self, inner: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        before = [
            (part, name, value, _version(value), _copy(value))
            for part in self._parts
            for name, value in part._buffers.items()
        ]
        with inner:
            yield
        for part, name, value, version, copy in before:
            now = part._buffers.get(name)
            same = now is value and _version(now) == version
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


class _Anew(contextlib.AbstractContextManager[None]):
    """What ``make`` makes, made again whenever it is entered: a graph that is kept is recomputed twice."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


class Buffers:
    """The buffers of the blocks of ``module`` that are recomputed as they are compiled, as these are now."""

    def __init__(self, module: nn.Module) -> None:
        self._found = [
            (block, {name: value.detach().clone() for name, value in _buffers(block)})
            for block in module.modules()
            if isinstance(block, CheckpointWrapper)
        ]

    def require_same(self) -> None:
        """Raise NotTrainable if a forward pass has changed one of them since."""
        for block, before in self._found:
            now = dict(_buffers(block))
            changed = [name for name, value in before.items() if not _equal(now.get(name), value)]
            if changed:
                kind = type(block._checkpoint_wrapped_module).__name__
                raise NotTrainable(
                    f"train.activation_checkpointing: {kind} changes its buffer {changed[0]} in "
                    "training, and compiled it may do so twice, or recompute with the changed one; set none, "
                    "or train.compile=false"
                )


def _buffers(block: CheckpointWrapper) -> Iterator[tuple[str, Tensor]]:
    inner: nn.Module = block._checkpoint_wrapped_module
    return inner.named_buffers()


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def _version(value: Tensor | None) -> int:
    """How often ``value`` was written into; an inference tensor does not count."""
    return -1 if value is None or value.is_inference() else value._version


def _equal(now: Tensor | None, before: Tensor) -> bool:
    """Whether the two hold the same; what is not a number is the same as itself."""
    if now is None or now.shape != before.shape or now.dtype != before.dtype:
        return False
    return bool(((now == before) | ((now != now) & (before != before))).all())
