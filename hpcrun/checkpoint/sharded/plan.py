"""The write plan: which rank writes which part of the state.

The mesh and the placements of a DTensor give the shards of all ranks. So a rank sends rank 0 a description of
its tensors, which is usually the same on all ranks, instead of a plan as in torch.distributed.checkpoint.
Rank 0 chooses a writer for each shard, and answers with a byte per tensor. If several ranks hold a shard, the
rank with the fewest bytes writes the shard. Whole tensors may differ between the ranks, such as the running
means of batch norm; rank 0 writes these.
"""

import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpcrun.ranks.collective import Ranks
from hpcrun.storage.errors import CheckpointError

Cut = tuple[int, int]
"""The tensor dimension that a mesh dimension divides (-1: none), and torch's split factor."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor, in elements per dimension."""


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
class PlacedTensor:
    """A tensor, the boxes that cover it exactly, and the rank that writes each box."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: Sequence[Box]
    writers: Sequence[int]


@dataclass(frozen=True)
class WritePlan:
    """The chunks that this rank writes; on rank 0 also the writers of all tensors.

    Attributes:
        parts: the chunks in the order of :func:`file_order`, without gaps.
        placed: all tensors, in the order of the state; empty except on rank 0.
    """

    parts: tuple[TensorChunk, ...]
    placed: tuple[PlacedTensor, ...]

    @property
    def size(self) -> int:
        """Bytes of this rank's chunks."""
        return sum(part.length for part in self.parts)

    @property
    def total(self) -> int:
        """Bytes of all tensors; 0 except on rank 0."""
        return sum(math.prod(each.shape) * width(each.dtype) for each in self.placed)


def describe(tensors: Mapping[str, torch.Tensor], alike: Callable[[str], bool]) -> bytes:
    """Return the properties that a plan depends on: equal descriptions of all ranks have equal plans.

    Args:
        alike: returns True if every rank has the same whole tensor of this name; otherwise rank 0 writes it.

    Returns:
        JSON: for each mesh its shape and the differences of its ranks; for each tensor its name, type, shape,
        and the number of a mesh with the cuts, or the value of ``alike``.
    """
    meshes: dict[Any, int] = {}
    rows = []
    for name, value in tensors.items():
        placement: Any
        if isinstance(value, DTensor):
            number = meshes.setdefault(value.device_mesh, len(meshes))
            placement = [number, [_cut(each) for each in value.placements]]
        else:
            placement = alike(name)
        rows.append([name, _dtype_name(value), list(value.shape), placement])
    numbered = []
    for mesh in meshes:
        ranks = mesh.mesh.flatten().tolist()
        # Differences are mostly equal, and compress well.
        steps = [after - before for before, after in itertools.pairwise([0, *ranks])]
        numbered.append([list(mesh.shape), steps])
    return json.dumps([numbered, rows]).encode()


def make_plan(description: bytes, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> WritePlan:
    """Distribute the writing of ``tensors`` with their :func:`describe`. Collective.

    Raises:
        CheckpointError: a tensor cannot be written as plain bytes, ranks describe a tensor differently, or
            the shards do not cover a tensor. Raised on all ranks.
    """
    try:
        require_dense(tensors)
        boxes = {name: _own_box(name, value) for name, value in tensors.items()}
        report: bytes | str = zlib.compress(description)
    except Exception as error:  # of any type: the other ranks wait for this rank's report
        report = ranks.named(error)
    reports = ranks.to_rank_0(report)
    placed: list[PlacedTensor] = []

    def answers() -> list[bytes]:
        troubles = [text for text in reports if isinstance(text, str)]
        if troubles:
            raise CheckpointError(troubles[0])
        found, chosen = distribute(reports)
        placed.extend(found)
        return chosen

    chosen = ranks.scatter_from_rank_0(answers)
    parts, position = [], 0
    for name in sorted(
        itertools.compress(tensors, chosen),
        key=lambda name: file_order(_dtype_name(tensors[name]), name),
    ):
        value, (offsets, sizes) = tensors[name], boxes[name]
        length = math.prod(sizes) * value.dtype.itemsize
        shape = tuple(value.shape)
        parts.append(TensorChunk(name, _dtype_name(value), shape, offsets, sizes, position, length))
        position += length
    return WritePlan(tuple(parts), tuple(placed))


def resolve(plan: WritePlan, tensors: Mapping[str, torch.Tensor]) -> Iterable[torch.Tensor]:
    """Yield the local tensor of each part of the plan, in order; raises CheckpointError for another shape."""
    for part in plan.parts:
        value = _local(tensors[part.name])
        if tuple(value.shape) != part.sizes:
            raise CheckpointError(
                f"{part.name}: the shard has the shape {tuple(value.shape)} instead of {part.sizes}"
            )
        yield value


def require_dense(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError, naming the tensor, if one of them is not stored as plain bytes."""
    for name, value in tensors.items():
        if value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(
                f"{name}: a sparse or quantized tensor cannot be saved; save it as dense tensors"
            )


def width(dtype: str) -> int:
    """Return the bytes of an element."""
    found: int = getattr(torch, dtype).itemsize
    return found


def file_order(dtype: str, name: str) -> tuple[int, str]:
    """Return the key of a tensor's place in the files; all ranks and the index use it."""
    # Wide element types come first: every part is then aligned for its type, without padding (which no
    # reader would verify).
    return -width(dtype), name


def distribute(reports: Sequence[bytes]) -> tuple[list[PlacedTensor], list[bytes]]:
    """Choose the writers. ``reports``: the compressed description of each rank.

    Returns:
        All tensors, and for each rank a byte per tensor of its description: 1 if the rank writes its box.

    Raises:
        CheckpointError: as :func:`make_plan`.
    """
    by_report: dict[bytes, list[int]] = {}
    for rank, report in enumerate(reports):
        by_report.setdefault(report, []).append(rank)
    meshes: dict[_Mesh, int] = {}
    found: dict[str, dict[_Placement, list[int]]] = {}
    chosen: list[bytearray] = [bytearray()] * len(reports)
    numbers: list[dict[str, int]] = [{}] * len(reports)
    for report, ranks in by_report.items():
        coded, rows = json.loads(zlib.decompress(report))
        here = [(tuple(shape), tuple(itertools.accumulate(steps))) for shape, steps in coded]
        names = {row[0]: number for number, row in enumerate(rows)}
        for rank in ranks:
            numbers[rank], chosen[rank] = names, bytearray(len(rows))
        for name, dtype, shape, where in rows:
            holders, layout = ranks, None
            if where is False:
                holders = ranks[:1] if ranks[0] == 0 else []
            elif where is not True:
                number, cuts = where
                layout = meshes.setdefault(here[number], len(meshes)), tuple(map(tuple, cuts))
            if holders:
                placement = dtype, tuple(shape), layout
                found.setdefault(name, {}).setdefault(placement, []).extend(holders)
    placed = _placed(found, list(meshes), len(reports))
    for tensor in placed:
        for writer in tensor.writers:
            chosen[writer][numbers[writer][tensor.name]] = 1
    return placed, [bytes(each) for each in chosen]


_Mesh = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and ranks of a mesh."""

_Placement = tuple[str, tuple[int, ...], tuple[int, tuple[Cut, ...]] | None]
"""Type and shape of a tensor; number of a mesh with the cuts, or None: whole."""

_Holders = dict[Box, list[int]]
"""The ranks that hold each box of a tensor, in order."""


def _placed(
    found: Mapping[str, Mapping[_Placement, list[int]]], meshes: Sequence[_Mesh], world_size: int
) -> list[PlacedTensor]:
    """Give each box to one of its holders. ``found``: the ranks that have a tensor, by its placement."""
    loads = [0] * world_size
    placed: list[PlacedTensor] = []
    shared = []
    known: dict[tuple[Any, ...], _Holders] = {}
    for name, placements in found.items():
        holders: _Holders | None = None
        (dtype, shape, _), *_ = placements
        for placement, present in placements.items():
            key = (placement[1:], *present)
            if key not in known:
                known[key] = _holders(placement, meshes, present)
            if holders is None:
                holders = known[key]
            elif placement[:2] == (dtype, shape) and holders.keys() == known[key].keys():
                holders = {box: sorted(holders[box] + more) for box, more in known[key].items()}
            else:
                raise CheckpointError(
                    f"{name}: has another type, shape or placement on other ranks"
                )
        if holders is None or not all(holders.values()):
            raise CheckpointError(f"{name}: no rank has some of its shards")
        element = width(dtype)
        writers = [ranks[0] for ranks in holders.values()]
        for number, ((_, sizes), ranks) in enumerate(holders.items()):
            length = math.prod(sizes) * element
            if len(ranks) == 1:
                loads[ranks[0]] += length
            else:
                shared.append((ranks[0], len(placed), number, length, ranks, writers))
        placed.append(PlacedTensor(name, dtype, shape, list(holders), writers))
    for *_, number, length, ranks, writers in sorted(shared):
        writers[number] = writer = min(ranks, key=loads.__getitem__)
        loads[writer] += length or 1
    return placed


def _holders(placement: _Placement, meshes: Sequence[_Mesh], ranks: list[int]) -> _Holders:
    """Return which of ``ranks`` hold which box. Empty shards have no box."""
    _, shape, layout = placement
    whole = ((0,) * len(shape), shape)
    if layout is None:
        return {whole: sorted(ranks)}
    number, cuts = layout
    mesh_shape, mesh_ranks = meshes[number]
    present, found = set(ranks), _Holders()
    places = itertools.product(*map(range, mesh_shape))
    for rank, place in zip(mesh_ranks, places, strict=True):
        box = _box(shape, mesh_shape, cuts, place)
        if box == whole or 0 not in box[1]:
            found.setdefault(box, []).extend([rank] if rank in present else [])
    return {box: sorted(holders) for box, holders in found.items()}


def _box(
    shape: Sequence[int], mesh_shape: Sequence[int], cuts: Sequence[Cut], place: Sequence[int]
) -> Box:
    """Return the box of the rank at ``place`` in the mesh, as torch divides a tensor."""
    offsets, sizes = [0] * len(shape), list(shape)

    def turn(number: int) -> tuple[int, int]:
        # FSDP over tensor parallelism divides after the later dimensions of the mesh (torch's _StridedShard).
        return (1, -number) if cuts[number][1] > 1 else (0, number)

    for number in sorted(range(len(cuts)), key=turn):
        dimension, _ = cuts[number]
        if dimension >= 0:
            chunk = -(-sizes[dimension] // mesh_shape[number])
            start = min(chunk * place[number], sizes[dimension])
            offsets[dimension] += start
            sizes[dimension] = min(chunk, sizes[dimension] - start)
    return tuple(offsets), tuple(sizes)


def _cut(placement: Any) -> Cut:
    return getattr(placement, "dim", -1), getattr(placement, "split_factor", 1)


def _own_box(name: str, value: torch.Tensor) -> Box:
    """Return the box of this rank; raises CheckpointError if torch's box is another."""
    shape = tuple(value.shape)
    place = value.device_mesh.get_coordinate() if isinstance(value, DTensor) else None
    if not isinstance(value, DTensor) or place is None:
        return (0,) * len(shape), shape
    if any(placement.is_partial() for placement in value.placements):
        raise CheckpointError(f"{name}: ranks hold addends of the tensor; redistribute it")
    box = _box(shape, value.device_mesh.shape, list(map(_cut, value.placements)), place)
    (chunk,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    torchs = tuple(chunk.offsets), tuple(chunk.sizes)
    local = tuple(_local(value).shape)
    if local != box[1] or (box != torchs and 0 not in local):
        raise CheckpointError(
            f"{name}: a shard of shape {local} is at {torchs}, not at {box} as after distribute_tensor"
        )
    return box


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _dtype_name(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
