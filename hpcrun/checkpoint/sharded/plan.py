"""Which rank writes which part of the state, decided by torch's own planner.

``torch.distributed.checkpoint`` knows who holds what of a sharded tensor and deals out what all ranks
hold alike; nothing of that is repeated here. What it does not know is that buffers may differ
between ranks that hold "the same" model (running means of batch norm, say): what is not the same by
construction is rank 0's.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem
from torch.distributed.tensor import DTensor

from hpcrun.checkpoint.sharded.collective import Together
from hpcrun.checkpoint.storage.errors import CheckpointError


@dataclass(frozen=True)
class Part:
    """A box of a tensor and where it lies in its rank's file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    position: int
    length: int


@dataclass(frozen=True)
class Plan:
    """What this rank writes, and on rank 0 what every rank does.

    ``parts`` are ``items`` laid out one behind the other, ``size`` bytes in all; ``everyone`` is empty on
    other ranks. ``total`` counts the bytes of all ranks.
    """

    items: tuple[WriteItem, ...]
    parts: tuple[Part, ...]
    size: int
    total: int
    everyone: tuple[tuple[Part, ...], ...]


def signature(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """What a plan depends on: as long as it stays the same, so does the plan."""
    return tuple(
        (name, value.shape, value.dtype, _placing(value)) for name, value in tensors.items()
    )


def make_plan(
    tensors: Mapping[str, torch.Tensor], alike: Callable[[str], bool], together: Together
) -> Plan:
    """Deal out ``tensors``, which have the same names on every rank. Collective.

    Args:
        alike: whether every rank holds the same values under this name; if not, rank 0 writes it.

    Raises:
        CheckpointError: a tensor cannot be written as plain bytes, or the ranks' shards do not make
            whole tensors. On all ranks.
    """
    mine: Any = {
        name: value
        for name, value in tensors.items()
        if together.rank == 0 or isinstance(value, DTensor) or alike(name)
    }
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        require_dense(tensors)
        planner.set_up_planner(mine, is_coordinator=together.rank == 0)
        local: SavePlan | str = planner.create_local_plan()
    except Exception as error:  # whatever it is, the others are waiting to hear
        local = together.named(error)
    locals_ = together.to_rank_0(local)

    def deal() -> list[Plan]:
        troubles = [text for text in locals_ if isinstance(text, str)]
        if troubles:
            raise CheckpointError(troubles[0])
        plans, _ = planner.create_global_plan(locals_)
        plans = [SavePlan(sorted(plan.items, key=_width, reverse=True)) for plan in plans]
        parts = [tuple(_lay_out(plan.items)) for plan in plans]
        sizes = [sum(part.length for part in rank) for rank in parts]
        total = sum(sizes)
        everyone.extend(parts)
        return [
            Plan(tuple(plan.items), mine, size, total, ())
            for plan, mine, size in zip(plans, parts, sizes, strict=True)
        ]

    # To each rank its own part only: all of them are as many bytes as there are ranks and tensors.
    everyone: list[tuple[Part, ...]] = []
    return replace(together.dealt_by_rank_0(deal), everyone=tuple(everyone))


def resolve(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> Iterable[torch.Tensor]:
    """The local tensor of each of the plan's items, in order; shapes as in ``parts``."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    state: Any = dict(tensors)
    planner.set_up_planner(state)
    for item in plan.items:
        found = planner.resolve_data(item)
        if not isinstance(found, torch.Tensor):
            raise CheckpointError(f"{item.index.fqn}: is no tensor")
        yield found


def require_dense(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError unless they are plain bytes; the text names one that is not."""
    for name, value in tensors.items():
        if value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(
                f"{name}: a sparse or quantized tensor cannot be saved; save it as dense ones"
            )


def _placing(value: torch.Tensor) -> Any:
    if isinstance(value, DTensor):
        return (*map(str, value.placements), value.device_mesh.shape, value.to_local().shape)
    return None


def _width(item: WriteItem) -> int:
    return _data(item).properties.dtype.itemsize


def _data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn}: is no tensor")
    return item.tensor_data


def _lay_out(items: Iterable[WriteItem]) -> Iterable[Part]:
    # Wide elements come first: every part is then aligned for its type, without a byte of padding
    # that no reader would check.
    position = 0
    for item in items:
        data = _data(item)
        dtype = data.properties.dtype
        length = math.prod(data.chunk.sizes) * dtype.itemsize
        yield Part(
            item.index.fqn,
            str(dtype).removeprefix("torch."),
            tuple(data.size),
            tuple(data.chunk.offsets),
            tuple(data.chunk.sizes),
            position,
            length,
        )
        position += length
