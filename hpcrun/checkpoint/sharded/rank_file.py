"""One rank's share of a save, as the bytes of the one file that it writes."""

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from hpcrun.checkpoint.sharded.host_staging import Staging, bytes_of, copy_in
from hpcrun.checkpoint.sharded.node_staging import Stage, Stored
from hpcrun.checkpoint.sharded.plan import Part, Plan, resolve
from hpcrun.checkpoint.storage.manifest import FileRecord
from hpcrun.checkpoint.storage.store import CheckpointStore

_BLOCK = 8 << 20
_DIRECT_FROM = 4 << 20

Span = tuple[int, int]
"""Position and length in bytes."""


@dataclass(frozen=True)
class Share:
    """The content of a file: tensors as planned, then the blobs.

    ``views`` gives one view per part and blob, in order; ``image`` is the whole file in memory;
    ``stored`` is the whole file in the stage folder, instead of both. Where there is neither, it is written
    straight from the tensors.
    """

    spans: tuple[Span, ...]
    blobs: tuple[str, ...]
    views: Callable[[], Iterable[memoryview]]
    image: memoryview | None
    stored: Stored | None = None

    @property
    def safe(self) -> bool:
        """Whether training may change the tensors before it is written."""
        return self.image is not None or self.stored is not None

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(length for _, length in self.spans)


@dataclass(frozen=True)
class Written:
    """What a rank tells of its file: its record, and the hash of each span. Blobs come last.

    ``notes`` is what else the user should know.
    """

    record: FileRecord
    spans: tuple[Span, ...]
    blobs: tuple[str, ...]
    hashes: tuple[str, ...]
    notes: tuple[str, ...] = ()


def file_name(rank: int) -> str:
    """The file of ``rank``."""
    return f"rank-{rank:05d}.bin"


def own_name(rank: int) -> str:
    """The blob that holds what belongs to ``rank`` alone."""
    return f"own-{rank:05d}"


def pack(data: Any) -> bytes:
    """Plain data and small tensors as ``torch.load(weights_only=True)`` takes them."""
    stream = io.BytesIO()
    torch.save(data, stream)
    return stream.getvalue()


def stage(
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    blobs: Mapping[str, bytes],
    staging: Staging,
) -> Share:
    """Copy this rank's share to host memory; nothing that training does afterwards changes it.

    Where the memory budget does not allow that, the share refers to the tensors themselves, and
    must be written before they change.
    """
    spans = _spans(plan.parts, blobs)
    size = sum(length for _, length in spans)
    if not staging.fits(size):
        return Share(spans, tuple(blobs), lambda: _straight(plan, tensors, blobs), None)
    buffer = staging.reserve(size)
    copy_in(buffer, plan.parts, resolve(plan, tensors))
    image = bytes_of(buffer)[:size]
    for (position, length), content in zip(spans[len(plan.parts) :], blobs.values(), strict=True):
        image[position : position + length] = content

    def views() -> Iterable[memoryview]:
        return (image[position : position + length] for position, length in spans)

    return Share(spans, tuple(blobs), views, image)


def write(share: Share, store: CheckpointStore, draft: Path, rank: int) -> Written:
    """Write, hash and fsync the file of ``rank``; raises CheckpointError."""
    image, stored = share.image, share.stored
    hashes: list[str] = []
    direct = share.safe and share.size >= _DIRECT_FROM
    with store.open_file(draft, file_name(rank), direct=direct) as stream:
        if stored is not None:
            hashes += stored.hashes
            for block in stored.blocks():
                stream.write(block)
        elif image is not None:
            for start in range(0, len(image), _BLOCK):
                stream.write(image[start : start + _BLOCK])
            hashes += [xxhash.xxh3_128_hexdigest(view) for view in share.views()]
        else:
            for view in share.views():
                hashes.append(xxhash.xxh3_128_hexdigest(view))
                stream.write(view)
    assert stream.record is not None
    return Written(stream.record, share.spans, share.blobs, tuple(hashes))


def to_stage(share: Share, stage: Stage) -> Share:
    """``share``, moved to the stage folder; raises CheckpointError, and is whole where it was then."""
    stored = stage.put(share.size, share.image, share.views)
    return replace(share, views=tuple, image=None, stored=stored)


def _spans(parts: Iterable[Part], blobs: Mapping[str, bytes]) -> tuple[Span, ...]:
    spans = [(part.position, part.length) for part in parts]
    position = sum(length for _, length in spans)
    for content in blobs.values():
        spans.append((position, len(content)))
        position += len(content)
    return tuple(spans)


def _straight(
    plan: Plan, tensors: Mapping[str, torch.Tensor], blobs: Mapping[str, bytes]
) -> Iterable[memoryview]:
    for value in resolve(plan, tensors):
        yield bytes_of(value.detach().cpu().contiguous())
    for content in blobs.values():
        yield memoryview(content)
