"""Tensors out of a committed checkpoint: torch's planner says which parts, every part is checked.

:class:`StoreReader` is a ``StorageReader`` of torch.distributed.checkpoint, so that whatever plans a load
there (resharding between any numbers of ranks, DTensor or plain) reads our files as well.
"""

import io
import math
import os
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from hpcrun.checkpoint.errors import CheckpointError, DamagedCheckpoint
from hpcrun.checkpoint.index import INDEX, Index, Piece, Place, decode
from hpcrun.checkpoint.staging import bytes_of
from hpcrun.checkpoint.store import CheckpointStore

# Small enough that what was read is still in the processor's cache when it is hashed.
_BLOCK = 1 << 20
_READERS = 4


class StoreReader(StorageReader):
    """Reads one committed step of ``store``; raises DamagedCheckpoint, naming the file, for any damage."""

    def __init__(self, store: CheckpointStore, step: int) -> None:
        self._store = store
        self._step = step
        raw = store.read(step, INDEX)
        try:
            self.index: Index = decode(raw)
        except DamagedCheckpoint as error:
            raise store.damaged(step, f"{store.path(step)}/{error}") from error
        self._pieces: dict[tuple[str, tuple[int, ...]], Piece] = {
            (name, piece.offsets): piece
            for name, entry in self.index.tensors.items()
            for piece in entry.pieces
        }

    def load(self, into: dict[str, torch.Tensor]) -> None:
        """Fill the tensors ``into``, whole or sharded, in place. Not collective.

        Raises:
            DamagedCheckpoint: what was read is not what was written.
            CheckpointError: one of them has another shape here, or is not in the checkpoint.
        """
        state: Any = dict(into)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        for name, value in into.items():
            entry = self.index.tensors.get(name)
            if entry is None or entry.shape != tuple(value.shape):
                there = "is not in the checkpoint" if entry is None else f"is {entry.shape} there"
                raise CheckpointError(f"{name}: {there}, {tuple(value.shape)} here")
        planner.set_up_planner(state, self.read_metadata(), is_coordinator=False)
        self.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()

    def blob(self, name: str) -> Any:
        """The plain data saved under ``name``; raises KeyError, DamagedCheckpoint, UnpicklingError."""
        place = self.index.blobs[name]
        raw = bytearray(place.length)
        self._fill(place, memoryview(raw))
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)

    def empty(self, name: str) -> torch.Tensor:
        """A tensor on the CPU that the whole of ``name`` can be loaded into."""
        entry = self.index.tensors[name]
        return torch.empty(entry.shape, dtype=_dtype(entry.dtype))

    # torch.distributed.checkpoint.StorageReader

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in torch's words."""
        entries: dict[str, Any] = {}
        for name, entry in self.index.tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                for piece in entry.pieces
            ]
            entries[name] = TensorStorageMetadata(
                TensorProperties(_dtype(entry.dtype)), torch.Size(entry.shape), chunks
            )
        return Metadata(entries)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: the index is read already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """``plan`` as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """``plans`` as they are."""
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: one reader reads one step."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a committed step lies there."""
        return (Path(checkpoint_id) / INDEX).is_file()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and check every piece that ``plan`` touches, once, in the order of the files."""
        wanted: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            if item.type is not LoadItemType.TENSOR:
                raise CheckpointError(f"{item.storage_index.fqn}: is a tensor in the checkpoint")
            wanted[_key(item.storage_index)].append(item)
        ordered = sorted(
            wanted.items(),
            key=lambda each: (
                self._pieces[each[0]].place.file,
                self._pieces[each[0]].place.position,
            ),
        )
        readers = min(_READERS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(readers, thread_name_prefix="restore") as pool:
            work = [
                pool.submit(self._deal, key[0], self._pieces[key], items, planner)
                for key, items in ordered
            ]
            try:
                for each in work:
                    each.result()
            finally:
                for each in work:
                    each.cancel()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _deal(
        self, name: str, piece: Piece, items: Iterable[ReadItem], planner: LoadPlanner
    ) -> None:
        dtype = _dtype(self.index.tensors[name].dtype)
        if piece.place.length != math.prod(piece.sizes) * dtype.itemsize:
            raise self._store.damaged(self._step, f"{INDEX}: {name}: sizes that do not fit")
        whole: torch.Tensor | None = None
        for item in items:
            target = planner.resolve_tensor(item).detach()
            if whole is None and _takes_all(target, piece, dtype):
                self._fill(piece.place, bytes_of(target))
                whole = target
            else:
                if whole is None:
                    whole = torch.empty(piece.sizes, dtype=dtype)
                    self._fill(piece.place, bytes_of(whole))
                part = whole
                boxes = zip(item.storage_offsets, item.lengths, strict=True)
                for dimension, (offset, length) in enumerate(boxes):
                    part = part.narrow(dimension, offset, length)
                target.copy_(part)
            planner.commit_tensor(item, target)

    def _fill(self, place: Place, view: memoryview) -> None:
        content = xxhash.xxh3_128()
        path = self._store.path(self._step) / place.file
        for block in self._store.read_into(self._step, place.file, place.position, view, _BLOCK):
            content.update(block)
        if content.hexdigest() != place.xxh3:
            raise self._store.damaged(
                self._step, f"{path}: its content is not what was written (hash)"
            )


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise DamagedCheckpoint(f"{INDEX}: {name!r} is no type of elements")
    return found


def _takes_all(target: torch.Tensor, piece: Piece, dtype: torch.dtype) -> bool:
    return (
        target.device.type == "cpu"
        and target.dtype == dtype
        and tuple(target.shape) == piece.sizes
        and target.is_contiguous()
    )
