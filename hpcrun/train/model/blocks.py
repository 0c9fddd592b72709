"""What a "block" of a model is: the unit that is gathered, recomputed or compiled at once.

Blocks are the elements of the model's lists (``nn.ModuleList``, ``nn.Sequential``, ``nn.ModuleDict``) whose
class occurs there more than once, or which are alone in it: a transformer's layers, a ResNet's bottlenecks.
Elements without parameters (activations) are none, and nothing inside a block is one.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from hpcrun.train.model.borrowed_parameters import borrowed

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of ``module``, each once, in the order in which they are declared."""
    found: dict[int, nn.Module] = {}
    _collect(module, found)
    return list(found.values())


def by_class(module: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """The parts below ``module`` of a class with one of ``names``, inner ones first."""
    wanted = set(names)
    return _below(module, lambda part: kind(part).__name__ in wanted)


def by_size(module: nn.Module, parameters: int) -> list[nn.Module]:
    """The smallest parts below ``module`` that hold ``parameters`` or more, inner ones first.

    What an inner part has taken does not count again for those around it. A part whose weights the model
    also uses outside of it is none of them: its weights count for the next part around it that may be one.
    """
    taken: set[int] = set()
    separate = _separate(module)

    def large(part: nn.Module) -> bool:
        own = {id(p): p.numel() for p in part.parameters() if id(p) not in taken}
        if isinstance(part, _NEVER_CALLED) or sum(own.values()) < parameters or not separate(part):
            return False
        taken.update(own)
        return True

    return _below(module, large)


def kind(module: nn.Module) -> type[nn.Module]:
    """The module's class, seen through the wrapper of activation checkpointing."""
    inner = module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else module
    return type(inner)


def unshared(root: nn.Module, parts: list[nn.Module]) -> list[nn.Module]:
    """Those of ``parts`` that hold no parameter which the model also uses outside of them (tied weights)."""
    separate = _separate(root)
    return [part for part in parts if separate(part)]


def _separate(root: nn.Module) -> Callable[[nn.Module], bool]:
    """Return what tells whether all uses of a part's parameters are inside of the part."""
    readers = borrowed(root)
    uses: Counter[int] = Counter()
    for part in root.modules():
        uses.update(id(p) for p in part._parameters.values() if p is not None)

    def own(part: nn.Module) -> bool:
        inside: Counter[int] = Counter()
        for inner in part.modules():
            inside.update(id(p) for p in inner._parameters.values() if p is not None)
        here = {id(inner) for inner in part.modules()}
        return all(
            uses[key] == count and readers.get(key, set()) <= here for key, count in inside.items()
        )

    return own


def _collect(module: nn.Module, found: dict[int, nn.Module]) -> None:
    classes: Counter[type[nn.Module]] = Counter()
    if isinstance(module, _LISTS):
        classes.update(kind(child) for child in module._modules.values() if child is not None)
    for child in module.children():
        alone = len(classes) == 1
        repeated = alone or classes[kind(child)] > 1
        if repeated and next(child.parameters(), None) is not None:
            found.setdefault(id(child), child)
        else:
            _collect(child, found)


def _below(module: nn.Module, chosen: Callable[[nn.Module], bool]) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}

    def walk(parent: nn.Module) -> None:
        # MultiheadAttention uses the weights of its parts without calling them.
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
