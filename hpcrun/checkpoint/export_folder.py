"""Export of the model to a folder: shards of safetensors, or torch.distributed.checkpoint (DCP).

Neither format needs the whole model in memory: safetensors takes one shard, DCP one piece as a rank wrote it.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from hpcrun.checkpoint.stored_model import StoredModel
from hpcrun.drafts import sync

INDEX_OF_SHARDS = "model.safetensors.index.json"
SHARD = 5_000_000_000
"""Bytes of a shard of safetensors, as in Hugging Face's ``save_pretrained``."""


def write_shards(
    model: StoredModel, folder: Path, metadata: Mapping[str, str], limit: int = SHARD
) -> None:
    """Write files of at most ``limit`` bytes of tensors, with the names and the index of Hugging Face.

    A tensor is never divided. A single shard is ``model.safetensors``, without an index.
    """
    from safetensors.torch import save_file

    sizes = {name: piece_bytes(model, name) for name in model.entries}
    shards = [*in_groups(sizes, limit)]
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else file
        save_file(model.tensors(names), folder / file, metadata=dict(metadata))
        sync(folder / file)
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX_OF_SHARDS).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        sync(folder / INDEX_OF_SHARDS)


def write_dcp(model: StoredModel, folder: Path) -> None:
    """Write a checkpoint that ``torch.distributed.checkpoint.load`` reads into ``model.state_dict()``."""
    writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
    planner = _PiecesPlanner(model)
    # Not dcp.save(): its CheckpointException, a BaseException, would hide the cause.
    writer.reset(folder)
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [written])


class _PiecesPlanner(DefaultSavePlanner):
    """A plan with the pieces of ``model``; a piece is read when the writer writes it."""

    def __init__(self, model: StoredModel) -> None:
        super().__init__()
        self._model = model

    def create_local_plan(self) -> SavePlan:
        items = [_item(self._model, name) for name in self._model.entries]
        others = [
            WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._model.others
        ]
        names: dict[str, Any] = {
            name: (name,) for name in (*self._model.entries, *self._model.others)
        }
        self.plan = SavePlan([each for group in items for each in group] + others, None, names)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name, offset = write_item.index.fqn, write_item.index.offset
        if offset is not None:
            return self._model.piece(name, tuple(offset))
        stream = io.BytesIO()
        torch.save(self._model.others[name], stream)
        return stream


def _item(model: StoredModel, name: str) -> Iterator[WriteItem]:
    entry = model.entries[name]
    properties = TensorProperties(dtype=getattr(torch, entry.dtype))
    for piece in entry.pieces:
        chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
        data = TensorWriteData(chunk, properties, torch.Size(entry.shape))
        index = MetadataIndex(name, piece.offsets)
        yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def piece_bytes(model: StoredModel, name: str) -> int:
    """Return the bytes of a tensor."""
    return sum(piece.place.length for piece in model.entries[name].pieces)


def in_groups(sizes: Mapping[str, int], limit: int) -> Iterable[list[str]]:
    """Yield the names in their order, in groups of at most ``limit`` in sum, or of one larger tensor."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group
