"""What each rank uses of a sharded model: compared in the first step, and agreed on where it may differ.

Ranks gather weights and reduce gradients part by part, each in the order of its own passes. Where one
skips a part, or has no gradient for a parameter, its next collective meets another one of the others':
gloo ends the process, NCCL waits, and where the sizes happen to be equal the numbers are mixed up.
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

from hpcrun.run.endings import node_name
from hpcrun.train.errors import known_to_all
from hpcrun.train.model.unused_parameters import reached, shortened, unreached

_RECOMPUTED = "_checkpoint_wrapped_module."


class ShardedUse:
    """Follows this rank's passes through ``module``, whose parts are sharded."""

    def __init__(self, module: nn.Module, device: torch.device, *, may_differ: bool) -> None:
        """``may_differ``: whether a parameter may be without a gradient on some ranks only."""
        self._module, self._device, self._may_differ = module, device, may_differ
        self._parts: dict[str, nn.Module] = {
            _plain(name): part
            for name, part in module.named_modules()
            if issubclass(type(part), FSDPModule)
        }
        # Sharded, a parameter is another tensor than the one that its part computes with.
        self._whole: dict[str, nn.Parameter] = {}
        self._learned: set[str] = set()
        self._used: set[str] = set()
        self._reached: set[str] = set()
        self._given: defaultdict[str, list[Any]] = defaultdict(list)
        self._results: defaultdict[str, list[Any]] = defaultdict(list)
        self._hooks: list[Any] = []
        self._group: Any = None
        self._rank = 0
        self._forward = self._last = False
        if may_differ:
            self._learn_parameters()

    def compare(self, group: Any, rank: int) -> None:
        """Have the ranks compare during the step that follows; ``group``: a control group of all."""
        self._group, self._rank = group, rank
        if not self._may_differ:
            self._hooks += self._learn_parameters()
        for place, (name, part) in enumerate(self._parts.items()):
            come = partial(self._come_to, place)
            self._hooks.append(part.register_forward_pre_hook(come, prepend=True))
            # After torch's own, which puts its turn in the backward pass into what the part is given.
            given, results = partial(self._note_given, name), partial(self._note_results, name)
            self._hooks.append(part.register_forward_pre_hook(given, with_kwargs=True))
            self._hooks.append(part.register_forward_hook(results))

    def begin(self, *, last: bool) -> None:
        """A micro-batch begins, the last one of its step or another."""
        self._forward, self._last = True, last

    def before_backward(self, value: Tensor) -> None:
        """The forward pass has led to ``value``. Collective while the ranks compare.

        Raises:
            UserError: they do not use the same; on all ranks.
        """
        if self._group is None:
            return
        self._come_to(len(self._parts))
        # Recomputing enters parts again, each rank when it gets there.
        self._forward = False
        self._compare_gradients(value)
        self._given.clear()
        self._results.clear()
        if self._last:
            self._group = None
            for hook in self._hooks:
                hook.remove()

    def settle(self) -> None:
        """After a step's passes: no gradient, instead of zero, for what no rank has used. Collective."""
        trained = [
            (_plain(name), parameter)
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad
        ]
        mine = [name in self._used for name, _ in trained]
        self._used.clear()
        anywhere = torch.tensor(mine, dtype=torch.int32, device=self._device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        # Reading it waits for the device, which a rank that has used everything need not do.
        if not all(mine):
            for (_, parameter), used in zip(trained, anywhere.tolist(), strict=True):
                if not used:
                    parameter.grad = None

    # A block that its model compiles has its hooks traced as well.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _come_to(self, place: int, *_: Any) -> None:
        """Compare where the ranks are: at a part that gathers its weights, or at the end."""
        if self._group is None or not self._forward:
            return
        least = torch.tensor([place, -place])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        if least[0] == -least[1]:
            return
        names = [*(name or "the model" for name in self._parts), "the end of its forward pass"]
        places = self._told_by_all((node_name(), names[place]))
        other = next(rank for rank, (_, name) in enumerate(places) if name != places[0][1])
        host, name = places[other]
        self._refuse(
            f"rank 0 comes to {places[0][1]} where rank {other} ({host}) comes to {name}; let all run the "
            "same parts in the same order, and multiply by zero what shall not count"
        )

    def _compare_gradients(self, value: Tensor) -> None:
        nodes = reached(value)
        self._reached |= self._whole.keys() - unreached(value, self._whole.items())
        # Gradients wait for the last micro-batch to be reduced, and any of the step's may have made them.
        missing = [
            name
            for name, parameter in self._whole.items()
            if self._last and parameter.requires_grad and name not in self._reached
        ]
        # A part that is backpropagated through takes its turn, also if none of its parameters has a gradient.
        idle = [name for name, ends in self._results.items() if _apart(nodes, ends)]
        # Where the pass does not get out at its front, a part reduces after the root and not before it.
        late = [name for name, ends in self._given.items() if self._last and _apart(nodes, ends)]
        words = self._told_by_all((node_name(), idle, late, missing))
        hosts, *kinds = zip(*words, strict=True)
        idle_alone, late_alone, missing_alone = map(_alone, kinds)
        for rank, parts in idle_alone:
            self._refuse(
                f"the loss of rank {rank} ({hosts[rank]}) depends on nothing of {_first(parts)}, and that of "
                "others does; let what it gives count on all ranks, be it times zero"
            )
        for rank, parts in late_alone:
            self._refuse(
                f"the loss of rank {rank} ({hosts[rank]}) does not depend on what {_first(parts)} is given, "
                "and that of others does; let it count on all ranks, be it times zero"
            )
        for rank, names in missing_alone:
            if not self._may_differ:
                raise known_to_all(
                    f"train.find_unused_parameters: the loss of rank {rank} ({hosts[rank]}) does not depend "
                    f"on {shortened(names)}, and that of other ranks does; set it to true",
                    self._rank,
                )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_given(self, part: str, _module: nn.Module, *given: Any) -> None:
        if self._forward:
            self._given[part] += _ends(given)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_results(self, part: str, _module: nn.Module, _given: Any, output: Any) -> None:
        if self._forward:
            self._results[part] += _ends(output)

    def _refuse(self, told: str) -> NoReturn:
        raise known_to_all(
            "train.parallel: under fsdp the ranks gather weights and reduce gradients together, and here "
            f"{told}; or take ddp with train.find_unused_parameters=true",
            self._rank,
        )

    def _told_by_all(self, mine: Any) -> list[Any]:
        words: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(words, mine, group=self._group)
        return words

    def _learn_parameters(self) -> list[Any]:
        """Note each part's parameters when it first runs with them trained; returns the hooks for it."""
        # Before torch's own, which takes the gathered weights away.
        return [
            part.register_forward_hook(partial(self._learn, name), prepend=True)
            for name, part in self._parts.items()
        ]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _learn(self, part: str, module: nn.Module, *_: Any) -> None:
        if part in self._learned:
            return
        frozen = False
        for inner, parameter in module.named_parameters(prefix=part):
            name = _plain(inner)
            if isinstance(parameter, DTensor) or name in self._whole:
                continue
            if not parameter.requires_grad:
                frozen = True
                continue
            self._whole[name] = parameter
            if self._may_differ:
                mark: Any = parameter.register_post_accumulate_grad_hook
                mark(partial(self._mark, name))
        # What is frozen may be trained later: such a part is looked through each time that it runs.
        if not frozen:
            self._learned.add(part)

    def _mark(self, name: str, _: Tensor) -> None:
        self._used.add(name)


def _ends(values: Any) -> list[Any]:
    """The nodes of autograd's graph that made the tensors in ``values``."""
    found = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [leaf.grad_fn for leaf in found if leaf.grad_fn is not None]


def _alone(named: Sequence[Sequence[str]]) -> list[tuple[int, list[str]]]:
    """Of the names that each rank gives: ranks, and what they name that not all do."""
    everywhere = set.intersection(*map(set, named))
    return [
        (rank, only)
        for rank, names in enumerate(named)
        if (only := [name for name in names if name not in everywhere])
    ]


def _apart(nodes: set[Any] | None, ends: Sequence[Any]) -> bool:
    """Whether none of ``ends`` is among ``nodes``; False where these cannot be seen."""
    return nodes is not None and not nodes & {*ends}


def _first(parts: Sequence[str]) -> str:
    """What to call the outermost of ``parts``: the whole has no name of its own."""
    return "the model" if "" in parts else parts[0]


def _plain(name: str) -> str:
    """The name without what recomputing activations puts into it."""
    return name.replace(_RECOMPUTED, "")
