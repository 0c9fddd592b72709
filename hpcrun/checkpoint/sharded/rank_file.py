"""The file of a rank: the content and the writing of its shard."""

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from hpcrun.checkpoint.sharded.host_staging import Staging, bytes_of, copy_in
from hpcrun.checkpoint.sharded.plan import TensorChunk, WritePlan, resolve
from hpcrun.checkpoint.storage.manifest import FileRecord
from hpcrun.checkpoint.storage.store import CheckpointStore

_BLOCK = 8 << 20

Span = tuple[int, int]
"""Position and length in bytes."""


@dataclass(frozen=True)
class RankShard:
    """A rank's shard: the content of its file, first the planned tensors, then the blobs.

    Attributes:
        spans: position and length of each part and blob.
        blobs: names of the blobs.
        views: function that returns a view per part and blob, in order.
        image: the whole file in memory; None: the file is written directly from the tensors.
    """

    spans: tuple[Span, ...]
    blobs: tuple[str, ...]
    views: Callable[[], Iterable[memoryview]]
    image: memoryview | None

    @property
    def safe(self) -> bool:
        """True if training may change the tensors before the shard is written."""
        return self.image is not None

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return sum(length for _, length in self.spans)


@dataclass(frozen=True)
class Written:
    """A rank's report on its file: the record, and the hash of each span (blobs last)."""

    record: FileRecord
    spans: tuple[Span, ...]
    blobs: tuple[str, ...]
    hashes: tuple[str, ...]


def file_name(rank: int) -> str:
    """Return the file name of ``rank``."""
    return f"rank-{rank:05d}.bin"


def own_name(rank: int) -> str:
    """Return the name of the blob with the state of ``rank``."""
    return f"own-{rank:05d}"


def pack(data: Any) -> bytes:
    """Serialize plain data and small tensors for ``torch.load(weights_only=True)``."""
    stream = io.BytesIO()
    torch.save(data, stream)
    return stream.getvalue()


def stage(
    plan: WritePlan,
    tensors: Mapping[str, torch.Tensor],
    blobs: Mapping[str, bytes],
    staging: Staging,
) -> RankShard:
    """Copy this rank's shard to host memory, so that training can continue and change the tensors.

    If the memory budget does not allow the copy, the shard refers to the tensors and must be written before
    they change.
    """
    spans = _spans(plan.parts, blobs)
    size = sum(length for _, length in spans)
    if not staging.fits(size):
        return RankShard(spans, tuple(blobs), lambda: _straight(plan, tensors, blobs), None)
    buffer = staging.reserve(size)
    copy_in(buffer, plan.parts, resolve(plan, tensors))
    image = bytes_of(buffer)[:size]
    for (position, length), content in zip(spans[len(plan.parts) :], blobs.values(), strict=True):
        image[position : position + length] = content

    def views() -> Iterable[memoryview]:
        return (image[position : position + length] for position, length in spans)

    return RankShard(spans, tuple(blobs), views, image)


def write(share: RankShard, store: CheckpointStore, draft: Path, rank: int) -> Written:
    """Write, hash and fsync the file of ``rank``; raises CheckpointError."""
    image = share.image
    hashes: list[str] = []
    direct = share.safe and share.size >= store.direct_from
    with store.open_file(draft, file_name(rank), direct=direct) as stream:
        if image is not None:
            for start in range(0, len(image), _BLOCK):
                stream.write(image[start : start + _BLOCK])
            hashes += [xxhash.xxh3_128_hexdigest(view) for view in share.views()]
        else:
            for view in share.views():
                hashes.append(xxhash.xxh3_128_hexdigest(view))
                stream.write(view)
    assert stream.record is not None
    return Written(stream.record, share.spans, share.blobs, tuple(hashes))


def _spans(parts: Iterable[TensorChunk], blobs: Mapping[str, bytes]) -> tuple[Span, ...]:
    spans = [(part.position, part.length) for part in parts]
    position = sum(length for _, length in spans)
    for content in blobs.values():
        spans.append((position, len(content)))
        position += len(content)
    return tuple(spans)


def _straight(
    plan: WritePlan, tensors: Mapping[str, torch.Tensor], blobs: Mapping[str, bytes]
) -> Iterable[memoryview]:
    for value in resolve(plan, tensors):
        yield bytes_of(value.detach().cpu().contiguous())
    for content in blobs.values():
        yield memoryview(content)
