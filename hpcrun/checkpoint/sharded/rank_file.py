"""The file of a rank: writing and reading of its shard.

Sharded tensors are read by the load plans of torch.distributed.checkpoint, which know how to reshard between
any numbers of ranks.
"""

import io
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from hpcrun.checkpoint.sharded.host_staging import Staging, bytes_of, copy_in
from hpcrun.checkpoint.sharded.plan import TensorChunk, WritePlan, resolve
from hpcrun.printing import Progress
from hpcrun.storage.counter import ByteCounter
from hpcrun.storage.disk import OpenFile
from hpcrun.storage.errors import CheckpointError, DamagedCheckpoint
from hpcrun.storage.index import INDEX, Index, Piece, Place, covered, decode, places
from hpcrun.storage.manifest import FileRecord
from hpcrun.storage.store import CheckpointStore

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


def hashed(share: RankShard, rank: int) -> Written:
    """Return the report on the file of ``rank`` without writing it; the shard is in host memory."""
    image = share.image
    if image is None:
        raise CheckpointError("the snapshot exceeds the memory budget")
    record = FileRecord(file_name(rank), share.size, xxhash.xxh3_128_hexdigest(image))
    hashes = tuple(xxhash.xxh3_128_hexdigest(view) for view in share.views())
    return Written(record, share.spans, share.blobs, hashes)


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


# Small enough that a block is still in the processor's cache when it is hashed.
_READ_BLOCK = 1 << 20
_RUN = 16 << 20
_READERS = 4


class StoreReader:
    """Reads a committed step of ``store``; raises DamagedCheckpoint, naming the file, on damage."""

    def __init__(self, store: CheckpointStore, step: int, index: bytes | None = None) -> None:
        """Read the index. ``index``: its content, if it was read before."""
        self._store = store
        self._step = step
        raw = store.read(step, INDEX) if index is None else index
        try:
            self.index: Index = decode(raw)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{store.path(step)}/{error}") from error
        self._pieces: dict[tuple[str, tuple[int, ...]], Piece] = {
            (name, piece.offsets): piece
            for name, entry in self.index.tensors.items()
            for piece in entry.pieces
        }

    def load(self, into: dict[str, torch.Tensor], progress: Progress = lambda *_: None) -> None:
        """Fill the tensors ``into``, whole or sharded, in place. Not collective.

        Args:
            progress: called with the bytes that were read, and the bytes to read.

        Raises:
            DamagedCheckpoint: the content differs from the written content.
            CheckpointError: as :meth:`require_fit`, before anything is read.
        """
        self.require_fit(into)
        sharded: Any = {}
        whole = []
        for name, value in into.items():
            if isinstance(value, DTensor):
                sharded[name] = value
            else:
                # A whole tensor needs all its pieces, so no plan is necessary. torch's planner takes as
                # long as the reading of small tensors.
                whole += [
                    _Want(name, piece, [_Taker(_box(value.detach(), piece.offsets, piece.sizes))])
                    for piece in self.index.tensors[name].pieces
                ]
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        targets: list[tuple[Any, torch.Tensor]] = []
        if sharded:
            planner.set_up_planner(sharded, self._metadata(), is_coordinator=False)
            planned, targets = self._planned(planner)
            whole += planned
        self._read(whole, progress)
        for item, target in targets:
            planner.commit_tensor(item, target)

    def require_fit(self, into: Mapping[str, torch.Tensor]) -> None:
        """Raise unless the tensors ``into`` can be loaded.

        Raises:
            DamagedCheckpoint: the index does not cover a tensor.
            CheckpointError: a tensor has another shape or type here, or is not in the checkpoint.
        """
        for name, value in into.items():
            entry = self.index.tensors.get(name)
            if entry is None or entry.shape != tuple(value.shape):
                saved = (
                    "not in the checkpoint" if entry is None else f"{entry.shape} in the checkpoint"
                )
                raise CheckpointError(f"{name}: {saved}, but {tuple(value.shape)} here")
            if _dtype(entry.dtype) != value.dtype:  # a silent conversion could lose precision
                raise CheckpointError(
                    f"{name}: {entry.dtype} in the checkpoint, but {value.dtype} here"
                )
            if not covered(entry):
                raise DamagedCheckpoint(f"{INDEX}: {name}: parts of it are missing")

    def blob(self, name: str) -> Any:
        """Return the plain data saved under ``name``; raises CheckpointError or DamagedCheckpoint."""
        place = self.index.blobs.get(name)
        if place is None:
            raise DamagedCheckpoint(f"{INDEX}: has no entry {name}")
        raw = bytearray(place.length)
        with self._store.opened(self._step, place.file) as file:
            self._fill(file, place, memoryview(raw))
        try:
            return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            # torch's message suggests loading without weights_only, which runs any code in the file.
            raise CheckpointError(
                f"{self._store.path(self._step)}: contains more than tensors and plain data, and is not "
                "loaded; check who wrote it, and move it away to resume from the previous checkpoint"
            ) from error

    def require(self, names: Collection[str]) -> None:
        """Compare all parts of the files ``names`` with their hashes; raises DamagedCheckpoint."""
        for place in places(self.index):
            if place.file in names:
                with self._store.opened(self._step, place.file) as file:
                    self._fill(file, place, memoryview(bytearray(place.length)))

    def position(self, name: str) -> tuple[str, int]:
        """Return the file of the first piece of ``name``, and its position in bytes."""
        places = [
            (piece.place.file, piece.place.position) for piece in self.index.tensors[name].pieces
        ]
        return min(places, default=("", 0))

    def empty(self, name: str) -> torch.Tensor:
        """Return an uninitialized CPU tensor for the whole of ``name``."""
        entry = self.index.tensors[name]
        return torch.empty(entry.shape, dtype=_dtype(entry.dtype))

    def _metadata(self) -> Metadata:
        """Return the index as torch's metadata."""
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

    def _planned(
        self, planner: DefaultLoadPlanner
    ) -> tuple[list["_Want"], list[tuple[Any, torch.Tensor]]]:
        """Return every piece that the planner needs, once, and the items to commit with their tensors."""
        wanted: dict[tuple[str, tuple[int, ...]], _Want] = {}
        targets = []
        for item in planner.finish_plan(planner.create_local_plan()).items:
            place = item.storage_index
            key = place.fqn, tuple(place.offset or ())
            want = wanted.setdefault(key, _Want(key[0], self._pieces[key], []))
            target = planner.resolve_tensor(item)
            targets.append((item, target))
            box = tuple(item.storage_offsets), tuple(item.lengths)
            want.takers.append(_Taker(target.detach(), box))
        return list(wanted.values()), targets

    def _read(self, wants: list["_Want"], progress: Progress) -> None:
        """Read and verify ``wants``, in file order."""
        readers = min(_READERS, len(os.sched_getaffinity(0)))
        counter = ByteCounter(progress, sum(want.piece.place.length for want in wants))
        with ThreadPoolExecutor(readers, thread_name_prefix="restore") as pool, counter:
            work = [pool.submit(self._read_run, run, counter) for run in _runs(wants)]
            try:
                for each in work:
                    each.result()
            finally:
                for each in work:
                    each.cancel()

    def _read_run(self, run: list["_Want"], counter: ByteCounter) -> None:
        with self._store.opened(self._step, run[0].piece.place.file) as file:
            for want in run:
                self._deal(file, want, counter.add)

    def _deal(self, file: OpenFile, want: "_Want", read: Callable[[int], None]) -> None:
        piece, dtype = want.piece, _dtype(self.index.tensors[want.name].dtype)
        if piece.place.length != math.prod(piece.sizes) * dtype.itemsize:
            raise DamagedCheckpoint(f"{INDEX}: {want.name}: the sizes do not match")
        whole: torch.Tensor | None = None
        for taker in want.takers:
            if whole is None and _takes_all(taker.target, piece, dtype):
                self._fill(file, piece.place, bytes_of(taker.target), read)
                whole = taker.target
                continue
            if whole is None:
                whole = torch.empty(piece.sizes, dtype=dtype)
                self._fill(file, piece.place, bytes_of(whole), read)
            taker.target.copy_(whole if taker.box is None else _box(whole, *taker.box))

    def _fill(
        self,
        file: OpenFile,
        place: Place,
        view: memoryview,
        read: Callable[[int], None] = lambda _: None,
    ) -> None:
        content = xxhash.xxh3_128()
        for block in file.fill(place.position, view, _READ_BLOCK):
            content.update(block)
            read(len(block))
        if content.hexdigest() != place.xxh3:
            raise self._store.changed(self._step, place.file)


@dataclass(frozen=True)
class _Taker:
    """A target of a piece: the whole piece, or the ``box`` with these offsets and sizes."""

    target: torch.Tensor
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class _Want:
    """A piece of the tensor ``name`` to read, with all its targets."""

    name: str
    piece: Piece
    takers: list[_Taker]


def _runs(wants: list[_Want]) -> Iterator[list[_Want]]:
    """Yield ``wants`` in file order, in groups of one file that a thread reads together."""
    run: list[_Want] = []
    size = 0
    for want in sorted(wants, key=lambda each: (each.piece.place.file, each.piece.place.position)):
        place = want.piece.place
        if run and (size >= _RUN or place.file != run[0].piece.place.file):
            yield run
            run, size = [], 0
        run.append(want)
        size += place.length
    if run:
        yield run


def _box(value: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        value = value.narrow(dimension, offset, size)
    return value


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{name!r}: not an element type here; use the torch that saved it")
    return found


def _takes_all(target: torch.Tensor, piece: Piece, dtype: torch.dtype) -> bool:
    return (
        target.device.type == "cpu"
        and target.dtype == dtype
        and tuple(target.shape) == piece.sizes
        and target.is_contiguous()
    )
