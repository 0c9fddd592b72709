"""Compute the weights of a sharded model with a deferred build, and keep a shard of each on every rank."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcrun.devices import accelerator
from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.train.deferred.build import Deferred, DeferredParameter
from hpcrun.train.deferred.tape import draws_random


def give_memory(module: nn.Module, place: torch.device) -> None:
    """Give the parameters of ``module``, sharded on the meta device, zeros on the device ``place``."""
    root: Any = module
    root._apply(lambda value: torch.zeros_like(value, device=place) if value.is_meta else value)


def fill(
    deferred: Deferred,
    *,
    device: torch.device,
    ranks: Ranks,
    advance: Callable[[], None],
) -> None:
    """Set the parameters of ``module``, which `give_memory` has prepared. Collective.

    Rank 0 computes the parameters one after another and broadcasts each, so that all ranks have the bits of
    one machine. A rank holds its shards, the current parameter, and what the build needs for it. The
    recording is used up.

    Args:
        device: of the collectives.
        ranks: all ranks, with a control group.
        advance: called after each parameter.

    Raises:
        UserError: on all ranks, if the ranks have built different models.
    """
    parameters = {each.name: each for each in deferred.parameters}
    mine = [described(parameters[name]) for name in deferred.order()]
    first = ranks.from_rank_0(lambda: mine)
    # The order is that of rank 0, which may initialize in another order.
    ranks.together(lambda: _require_same(sorted(first), sorted(mine)))

    def share(name: str, value: Tensor) -> None:
        whole = value.to(device).contiguous()
        dist.broadcast(whole, src=0)
        _keep(parameters[name], whole)
        if accelerator.is_accelerator(device):
            # NCCL counts its timeout from the call, and memory is held until the end: the ranks that wait
            # for rank 0 must not queue all parameters at once.
            accelerator.synchronize_stream(device)
        advance()

    with torch.no_grad():
        if ranks.rank == 0:
            deferred.compute(share)
        else:
            for name, size, _ in first:
                share(name, torch.empty(size, dtype=parameters[name].view.dtype, device=device))
    deferred.tape.clear()


def described(parameter: DeferredParameter) -> tuple[str, tuple[int, ...], str]:
    """Return the name, the size and the type of ``parameter``."""
    return parameter.name, parameter.view.size, str(parameter.view.dtype)


def _require_same(first: list[Any], mine: list[Any]) -> None:
    if first != mine:
        here, there = next(
            ((a, b) for a, b in zip(mine, first, strict=False) if a != b), ("more", "less")
        )
        raise UserError(
            f"task: build_model() gives this rank another model than rank 0 ({here} instead of {there}); "
            "build the same model on all ranks"
        )


def _keep(parameter: DeferredParameter, whole: Tensor) -> None:
    """Copy this rank's shard of ``whole`` into the parameter."""
    owner, name = parameter.owners[0]
    current = owner._parameters[name]
    assert isinstance(current, DTensor)
    sizes, offsets = compute_local_shape_and_global_offset(
        current.shape, current.device_mesh, current.placements
    )
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dimension, min(offset, whole.shape[dimension]), size)
    current.to_local().copy_(whole)


class LaterDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which the first draw computes the state that a normal build leaves.

    That takes the time of all draws of the build, so it happens only if something draws from this state: not
    after ``manual_seed``, but within ``fork_rng``, and with a generator that took over the state.
    """

    def __init__(self, deferred: Deferred, advance: Callable[[], None]) -> None:
        """Follow the draws of ``deferred``; ``advance`` is called after each draw that is computed."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._deferred, self._advance = deferred, advance
        self._after: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_random(func, args, kwargs):
            leaves = tree_leaves((args, kwargs))
            given = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
            generator = given[0] if given else torch.default_generator
            if self._deferred.left(generator):
                if self._after is None:
                    self._after = self._deferred.state_after(self._advance)
                generator.set_state(self._after)
        return func(*args, **(kwargs or {}))
