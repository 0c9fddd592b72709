"""Find the blocks of a model: the units of FSDP, activation checkpointing and compilation.

Blocks are elements of the model's lists (``nn.ModuleList``, ``nn.Sequential``, ``nn.ModuleDict``) if their
class occurs in the list more than once, or if it is the only class in the list: a transformer's layers, a
ResNet's bottlenecks. Elements without parameters (activations) are not blocks, and blocks do not nest. An
embedding is no block: its matrix is often the output's too (``F.linear(x, embedding.weight)``).

A block that writes its buffers (running statistics, vectors of a spectral norm) writes them again when its
activations are recomputed. The recomputation here starts from the same buffers as the first pass, and then
restores the values that the first pass left.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint, noop_context_fn

from hpcrun.errors import NotTrainable

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``module``, each once, in the order of declaration."""
    found: dict[int, nn.Module] = {}
    _collect(module, found)
    return list(found.values())


def by_class(module: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """Return the submodules of ``module`` with a class name in ``names``, inner ones first."""
    wanted = set(names)
    return _below(module, lambda part: kind(part).__name__ in wanted)


def by_size(module: nn.Module, parameters: int) -> list[nn.Module]:
    """Return the smallest submodules with at least ``parameters`` elements, inner ones first.

    Parameters of a chosen submodule do not count again for its parents. An embedding and a submodule with
    tied weights are never chosen; their weights count for the next eligible parent.
    """
    taken: set[int] = set()
    separate = _separate(module)
    never = (*_NEVER_CALLED, *_EMBEDDINGS)

    def large(part: nn.Module) -> bool:
        own = {id(p): p.numel() for p in part.parameters() if id(p) not in taken}
        if isinstance(part, never) or sum(own.values()) < parameters or not separate(part):
            return False
        taken.update(own)
        return True

    return _below(module, large)


def kind(module: nn.Module) -> type[nn.Module]:
    """Return the module's class; for a checkpointed module, the class of the wrapped module."""
    inner = module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else module
    return type(inner)


def unshared(root: nn.Module, parts: list[nn.Module]) -> list[nn.Module]:
    """Return the ``parts`` without tied weights: no other module has their parameters."""
    separate = _separate(root)
    return [part for part in parts if separate(part)]


def _separate(root: nn.Module) -> Callable[[nn.Module], bool]:
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
        repeated = (same_class or classes[kind(child)] > 1) and kind(child) not in _EMBEDDINGS
        if repeated and next(child.parameters(), None) is not None:
            found.setdefault(id(child), child)
        else:
            _collect(child, found)


def _below(module: nn.Module, chosen: Callable[[nn.Module], bool]) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}

    def walk(parent: nn.Module) -> None:
        # MultiheadAttention uses the weights of its submodules without calling them.
        if isinstance(parent, nn.MultiheadAttention):
            return
        for child in parent.children():
            inner = (
                child._checkpoint_wrapped_module if isinstance(child, CheckpointWrapper) else child
            )
            walk(inner)
            if id(child) not in found and chosen(child):
                found[id(child)] = child

    walk(module)
    return list(found.values())


Contexts = tuple[
    contextlib.AbstractContextManager[Any],
    contextlib.AbstractContextManager[Any],
]

_SMALL = 1 << 16
"""Maximum elements of a buffer to copy even if its version counter is unchanged: torch's batch-norm kernel
does not raise the counter. Masks and tables are larger, and constant in most models."""


def keeping_buffers(block: nn.Module) -> Callable[..., Any] | None:
    """Return a checkpoint function that keeps the buffers of ``block``; None if the block has no buffers."""
    return _recomputed if any(part._buffers for part in block.modules()) else None


def _recomputed(
    block: nn.Module,
    *arguments: Any,
    context_fn: Callable[[], Contexts] = noop_context_fn,
    **options: Any,
) -> Any:
    """Checkpoint ``block`` as torch's ``checkpoint`` does, with its ``context_fn``."""
    contexts = _Passes(block, context_fn)
    return checkpoint(block, *arguments, use_reentrant=False, context_fn=contexts, **options)


class _Passes:
    """Contexts for the first pass and for each recomputation."""

    def __init__(self, block: nn.Module, inner: Callable[[], Contexts]) -> None:
        self._parts = [part for part in block.modules() if part._buffers]
        self._inner = inner
        self._found: list[tuple[nn.Module, str, Tensor | None]] = []

    def __call__(self) -> Contexts:
        first, again = self._inner()
        return self._first(first), _Reentered(lambda: self._again(again))

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
            # A fresh copy for each recomputation. The old tensor may be needed for a gradient.
            part._buffers[name] = _copy(value)
        try:
            with inner:
                yield
        finally:  # Torch ends the recomputation by an exception once it has all it needs.
            for part, buffers in left:
                part._buffers.update(buffers)


class _Reentered(contextlib.AbstractContextManager[None]):
    """Context made new at each entry: with retain_graph=True torch recomputes more than once."""

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
    """Copies of the buffers of compiled, checkpointed blocks in ``module``, taken at construction."""

    def __init__(self, module: nn.Module) -> None:
        self._found = [
            (block, {name: value.detach().clone() for name, value in _buffers(block)})
            for block in module.modules()
            if isinstance(block, CheckpointWrapper)
        ]

    def require_same(self) -> None:
        """Raise NotTrainable if a forward pass has changed one of the buffers since."""
        for block, before in self._found:
            now = dict(_buffers(block))
            changed = [name for name, value in before.items() if not _equal(now.get(name), value)]
            if changed:
                kind = type(block._checkpoint_wrapped_module).__name__
                raise NotTrainable(
                    f"train.activation_checkpointing: {kind} changes its buffer {changed[0]} in "
                    "training; compiled, it may change it twice, or recompute with the changed buffer; set "
                    "none, or train.compile=false"
                )


def _buffers(block: CheckpointWrapper) -> Iterator[tuple[str, Tensor]]:
    inner: nn.Module = block._checkpoint_wrapped_module
    return inner.named_buffers()


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def _version(value: Tensor | None) -> int:
    """Return the number of writes to ``value``; -1 for an inference tensor, which has no counter."""
    return -1 if value is None or value.is_inference() else value._version


def _equal(now: Tensor | None, before: Tensor) -> bool:
    """Return True if both hold the same values; NaN equals NaN."""
    if now is None or now.shape != before.shape or now.dtype != before.dtype:
        return False
    return bool(((now == before) | ((now != now) & (before != before))).all())
