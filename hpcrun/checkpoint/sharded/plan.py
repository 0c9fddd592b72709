"""The write plan: which rank writes which part of the state. torch's planner decides.

``torch.distributed.checkpoint`` knows the shards of each rank, and distributes tensors that are the same on
all ranks. It assumes that every unsharded tensor is the same, but buffers may differ between the replicas of
a model (such as the running means of batch norm). Tensors that may differ are therefore left to rank 0.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem
from torch.distributed.tensor import DTensor

from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.ranks.collective import Ranks


@dataclass(frozen=True)
class TensorChunk:
    """A chunk of a tensor, and its position and length in the rank's file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    position: int
    length: int


@dataclass(frozen=True)
class WritePlan:
    """The parts that this rank writes; on rank 0 also the parts of every rank.

    Attributes:
        items: torch's write items of this rank.
        parts: layout of ``items`` in the file, without gaps.
        size: bytes of ``parts``.
        total: bytes of all ranks.
        everyone: the parts of every rank; empty except on rank 0.
    """

    items: tuple[WriteItem, ...]
    parts: tuple[TensorChunk, ...]
    size: int
    total: int
    everyone: tuple[tuple[TensorChunk, ...], ...]


def signature(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """Return the properties that a plan depends on: equal signatures have equal plans."""
    return tuple(
        (name, value.shape, value.dtype, _placing(value)) for name, value in tensors.items()
    )


def make_plan(
    tensors: Mapping[str, torch.Tensor], alike: Callable[[str], bool], ranks: Ranks
) -> WritePlan:
    """Distribute the writing of ``tensors``, which have the same names on every rank. Collective.

    Args:
        alike: returns True if every rank has the same value under this name; otherwise rank 0 writes it.

    Raises:
        CheckpointError: a tensor cannot be written as plain bytes, or the shards do not cover a tensor.
            Raised on all ranks.
    """
    mine: Any = {
        name: value
        for name, value in tensors.items()
        if ranks.rank == 0 or isinstance(value, DTensor) or alike(name)
    }
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        require_dense(tensors)
        planner.set_up_planner(mine, is_coordinator=ranks.rank == 0)
        local: SavePlan | str = planner.create_local_plan()
    except Exception as error:  # of any type: the other ranks wait for this rank's report
        local = ranks.named(error)
    locals_ = ranks.to_rank_0(local)

    def deal() -> list[WritePlan]:
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
            WritePlan(tuple(plan.items), mine, size, total, ())
            for plan, mine, size in zip(plans, parts, sizes, strict=True)
        ]

    # Each rank gets only its part: the whole plan grows with the product of ranks and tensors.
    everyone: list[tuple[TensorChunk, ...]] = []
    return replace(ranks.scatter_from_rank_0(deal), everyone=tuple(everyone))


def resolve(plan: WritePlan, tensors: Mapping[str, torch.Tensor]) -> Iterable[torch.Tensor]:
    """Yield the local tensor of each item of the plan, in order, with the shapes of ``parts``."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    state: Any = dict(tensors)
    planner.set_up_planner(state)
    for item in plan.items:
        found = planner.resolve_data(item)
        if not isinstance(found, torch.Tensor):
            raise CheckpointError(f"{item.index.fqn}: is not a tensor")
        yield found


def require_dense(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError, naming the tensor, if one of them is not stored as plain bytes."""
    for name, value in tensors.items():
        if value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(
                f"{name}: a sparse or quantized tensor cannot be saved; save it as dense tensors"
            )


def _placing(value: torch.Tensor) -> Any:
    if isinstance(value, DTensor):
        return (*map(str, value.placements), value.device_mesh.shape, value.to_local().shape)
    return None


def _width(item: WriteItem) -> int:
    return _data(item).properties.dtype.itemsize


def _data(item: WriteItem) -> TensorWriteData:
    if item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn}: is not a tensor")
    return item.tensor_data


def _lay_out(items: Iterable[WriteItem]) -> Iterable[TensorChunk]:
    # Wide element types come first: every part is then aligned for its type, without padding (which no
    # reader would verify).
    position = 0
    for item in items:
        data = _data(item)
        dtype = data.properties.dtype
        length = math.prod(data.chunk.sizes) * dtype.itemsize
        yield TensorChunk(
            item.index.fqn,
            str(dtype).removeprefix("torch."),
            tuple(data.size),
            tuple(data.chunk.offsets),
            tuple(data.chunk.sizes),
            position,
            length,
        )
        position += length
