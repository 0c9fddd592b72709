"""Find the blocks of a model: the units of FSDP, activation checkpointing and compilation.

Blocks are elements of the model's lists (``nn.ModuleList``, ``nn.Sequential``, ``nn.ModuleDict``) if their
class occurs in the list more than once, or if it is the only class in the list: a transformer's layers, a
ResNet's bottlenecks. Elements without parameters (activations) are not blocks, and blocks do not nest. An
embedding is no block: its matrix is often the output's too (``F.linear(x, embedding.weight)``).

A block that writes its buffers (running statistics, vectors of a spectral norm) would write them again when
its activations are recomputed, so activation checkpointing refuses such a block.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

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


class Buffers:
    """Copies of the buffers of checkpointed blocks in ``module``, taken at construction."""

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
                    "training, and would change it twice; set none"
                )


def _buffers(block: CheckpointWrapper) -> Iterator[tuple[str, Tensor]]:
    inner: nn.Module = block._checkpoint_wrapped_module
    return inner.named_buffers()


def _equal(now: Tensor | None, before: Tensor) -> bool:
    """Return True if both hold the same values; NaN equals NaN."""
    if now is None or now.shape != before.shape or now.dtype != before.dtype:
        return False
    return bool(((now == before) | ((now != now) & (before != before))).all())
