"""Check that all ranks use the same parts of a sharded model, in the same order.

FSDP ranks gather weights and reduce gradients part by part, in the order of the rank's own passes. If one
rank skips a part, or has no gradient for a parameter, its next collective meets a different collective of the
other ranks: gloo ends the process, NCCL hangs, and if the sizes happen to be equal the numbers are mixed up.
The ranks compare their use in the first step.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from hpcrun.errors import error_on_all_ranks
from hpcrun.ranks.collective import Ranks
from hpcrun.run.endings import node_name
from hpcrun.train.model.checks import reached, shortened, unreached

_RECOMPUTED = "_checkpoint_wrapped_module."


class ShardedUse:
    """Tracks this rank's passes through ``module``, which has sharded submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._parts: dict[str, nn.Module] = {
            _plain(name): part
            for name, part in module.named_modules()
            if issubclass(type(part), FSDPModule)
        }
        # Unsharded parameters: the tensors with which a part computes are not the sharded ones.
        self._whole: dict[str, nn.Parameter] = {}
        self._reached: set[str] = set()
        self._given: defaultdict[str, list[Any]] = defaultdict(list)
        self._results: defaultdict[str, list[Any]] = defaultdict(list)
        self._hooks: list[Any] = []
        self._ranks = Ranks()
        self._comparing = self._forward = self._last = self._reduces = False

    def compare(self, ranks: Ranks) -> None:
        """Make ``ranks``, which have a control group, compare during the next step."""
        self._ranks, self._comparing = ranks, True
        # Before FSDP's own hook, which frees the gathered weights.
        self._hooks += [
            part.register_forward_hook(partial(self._learn, name), prepend=True)
            for name, part in self._parts.items()
        ]
        for place, (name, part) in enumerate(self._parts.items()):
            come = partial(self._come_to, place)
            self._hooks.append(part.register_forward_pre_hook(come, prepend=True))
            # After FSDP's own hook, which inserts its backward hook into the inputs of the part.
            given, results = partial(self._note_given, name), partial(self._note_results, name)
            self._hooks.append(part.register_forward_pre_hook(given, with_kwargs=True))
            self._hooks.append(part.register_forward_hook(results))

    def begin(self, *, last: bool, reduces: bool) -> None:
        """Start a micro-batch; ``last``: of its step; ``reduces``: its backward pass reduces gradients."""
        self._forward, self._last, self._reduces = True, last, reduces

    def before_backward(self, value: Tensor) -> None:
        """Check the end of a forward pass with the loss ``value``. Collective while the ranks compare.

        Raises:
            UserError: on all ranks, if the ranks use different parts or parameters.
        """
        if not self._comparing:
            return
        self._come_to(len(self._parts))
        # Activation checkpointing runs parts again in the backward pass, at a different time on each rank.
        self._forward = False
        self._compare_gradients(value)
        self._given.clear()
        self._results.clear()
        if self._last:
            self._comparing = False
            for hook in self._hooks:
                hook.remove()

    # If the model compiles its own block, the compiler would trace these hooks too.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _come_to(self, place: int, *_: Any) -> None:
        """Compare the ranks' positions: at a part that gathers its weights, or at the end of the pass."""
        if not (self._comparing and self._forward):
            return
        least = torch.tensor([place, -place])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._ranks.group)
        if least[0] == -least[1]:
            return
        names = [*(name or "the model" for name in self._parts), "the end of its forward pass"]
        places = self._ranks.gather((node_name(), names[place]))
        other = next(rank for rank, (_, name) in enumerate(places) if name != places[0][1])
        host, name = places[other]
        self._refuse(
            f"rank 0 reaches {places[0][1]} while rank {other} ({host}) reaches {name}; run the same modules "
            "in the same order on every rank, and multiply unused outputs by 0"
        )

    def _compare_gradients(self, value: Tensor) -> None:
        nodes = reached(value)
        self._reached |= self._whole.keys() - unreached(value, self._whole.items())
        # A reduction takes the gradients of this micro-batch and of those before that had no reduction.
        missing = [
            name
            for name, parameter in self._whole.items()
            if self._reduces and parameter.requires_grad and name not in self._reached
        ]
        # A unit in the backward pass joins collectives even if none of its parameters has a gradient.
        idle = [name for name, ends in self._results.items() if _apart(nodes, ends)]
        # If the gradient does not reach the part's inputs, the part reduces after the root, not before it.
        late = [name for name, ends in self._given.items() if self._reduces and _apart(nodes, ends)]
        if self._reduces:
            self._reached.clear()
        unused = [part or "the model" for part in sorted(idle)]
        unused += [f"the inputs of {part or 'the model'}" for part in late]
        hosts, found = zip(*self._ranks.gather((node_name(), unused + missing)), strict=True)
        everywhere = set.intersection(*map(set, found))
        for rank, names in enumerate(found):
            if only := [name for name in names if name not in everywhere]:
                self._refuse(
                    f"the loss of rank {rank} ({hosts[rank]}) does not depend on {shortened(only)}, but that "
                    "of other ranks does; use them on every rank, times 0 where they must not count"
                )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_given(self, part: str, _module: nn.Module, *given: Any) -> None:
        if self._forward:
            self._given[part] += _ends(given)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_results(self, part: str, _module: nn.Module, _given: Any, output: Any) -> None:
        if self._forward:
            self._results[part] += _ends(output)

    def _refuse(self, reason: str) -> NoReturn:
        raise error_on_all_ranks(
            "train.parallel: under fsdp the ranks gather weights and reduce gradients together, but "
            f"{reason}; or use ddp with train.find_unused_parameters=true",
            self._ranks.rank,
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _learn(self, part: str, module: nn.Module, *_: Any) -> None:
        for inner, parameter in module.named_parameters(prefix=part):
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                self._whole.setdefault(_plain(inner), parameter)


def _ends(values: Any) -> list[Any]:
    """Return the nodes of autograd's graph that produced the tensors in ``values``."""
    found = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [leaf.grad_fn for leaf in found if leaf.grad_fn is not None]


def _apart(nodes: set[Any] | None, ends: Sequence[Any]) -> bool:
    """Return True if none of ``ends`` is among ``nodes``; False if the nodes are unknown."""
    return nodes is not None and not nodes & {*ends}


def _plain(name: str) -> str:
    """Remove the prefix of activation checkpointing from a parameter's name."""
    return name.replace(_RECOMPUTED, "")
