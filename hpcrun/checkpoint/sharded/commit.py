"""The steps of a save on all ranks: write, agree, commit, and keep a copy in memory."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from hpcrun.checkpoint.memory.copies import MemoryCopies, MemorySnapshot
from hpcrun.checkpoint.outcome import SaveOutcome
from hpcrun.checkpoint.sharded.plan import PlacedTensor, WritePlan, file_order, width
from hpcrun.checkpoint.sharded.rank_file import RankShard, Written, hashed, write
from hpcrun.ranks.collective import Ranks, first_of
from hpcrun.run.record import OwnedByAnotherAttempt
from hpcrun.storage.errors import CheckpointError, amount
from hpcrun.storage.index import INDEX, Index, Piece, Place, TensorEntry, encode
from hpcrun.storage.manifest import FileRecord
from hpcrun.storage.manifest import encode as encode_manifest
from hpcrun.storage.store import CheckpointStore


@dataclass(frozen=True)
class SaveJob:
    """A rank's part of a save.

    Attributes:
        share: the shard; or the error line if this rank has none; or None if another rank failed.
        meta: plain JSON for the manifest; rank 0's is used.
        disk: True to commit the snapshot on disk.
        memory: True to keep the snapshot in the memory of the nodes.
    """

    step: int
    plan: WritePlan | None
    share: RankShard | str | None
    meta: Mapping[str, Any]
    disk: bool = True
    memory: bool = True


class CommitProtocol:
    """The steps of a save, which all ranks take together.

    Args:
        still_mine: raises OwnedByAnotherAttempt if a newer attempt owns the run; called on rank 0.
        after_commit: called by rank 0 after the commit of a step; a CheckpointError becomes a note.
        memory: keeps a copy of each snapshot in the memory of the nodes; None: no copies.
    """

    def __init__(
        self,
        store: CheckpointStore,
        ranks: Ranks,
        still_mine: Callable[[], None],
        after_commit: Callable[[int], None],
        memory: MemoryCopies | None = None,
    ) -> None:
        self._store = store
        self._ranks = ranks
        self._still_mine = still_mine
        self._tidy = after_commit
        self._memory = memory
        self._index = b""
        self._written: list[Written | str | None] = []
        self._swept = False
        self._left: list[str] = []

    def run(self, job: SaveJob) -> SaveOutcome:
        """Commit, and return the same result on all ranks; disk errors are part of the result. Collective.

        A job without the disk is only kept in memory. The first save, and the save after a failed cleanup,
        also remove leftovers of dead attempts.

        Raises:
            RuntimeError: another rank is gone (torch.distributed).
        """
        if not job.disk:
            work = partial(hashed, rank=self._ranks.rank)
            return self._keep(job, self._ranks.to_rank_0(self._report(job, work)))
        begun = self._ranks.from_rank_0(lambda: self._begin(job))
        if isinstance(begun, SaveOutcome):
            return begun
        draft = self._store.root / begun
        work = partial(write, store=self._store, draft=draft, rank=self._ranks.rank)
        self._written = self._ranks.to_rank_0(self._report(job, work))
        return self._ranks.from_rank_0(lambda: self._conclude(job, draft, self._written))

    def copy(self, job: SaveJob, outcome: SaveOutcome) -> SaveOutcome:
        """Keep a committed snapshot in memory too, if that is wanted; return its result. Collective."""
        if not (outcome.ok and job.disk and job.memory and self._memory and self._memory.active):
            return outcome
        try:
            kept = self._keep(job, self._written)
        except Exception as error:  # such as a lost rank; the step is committed nevertheless
            self._memory.active = False
            kept = SaveOutcome(False, job.step, error=self._ranks.named(error))
        notes = [kept.error] if kept.error is not None else []
        return replace(outcome, notes=(*outcome.notes, *notes))

    def _begin(self, job: SaveJob) -> str | SaveOutcome:
        try:
            self._still_mine()
            self._sweep()
            if job.plan is not None and isinstance(job.share, RankShard):
                # An estimate: the plain data of other ranks is about as large as this rank's.
                blobs = (job.share.size - job.plan.size) * self._ranks.world_size
                what = f"{amount(job.plan.total)} of tensors, {amount(blobs)} of other state"
                self._store.require_free(job.plan.total + blobs, what)
            return self._store.begin(job.step).name
        except OwnedByAnotherAttempt as error:
            return SaveOutcome(False, job.step, error=str(error), fenced=True)
        except (CheckpointError, OSError) as error:
            return SaveOutcome(False, job.step, error=self._ranks.named(error))

    def _sweep(self) -> None:
        """Remove leftovers. A leftover that stays (a file open on NFS) costs space, but not this save."""
        self._left = []
        if not self._swept:
            try:
                self._store.sweep()
                self._left = self._store.quarantine_damaged()
                self._swept = True
            except CheckpointError as error:
                self._left = [self._ranks.named(error)]

    def _report(self, job: SaveJob, work: Callable[[RankShard], Written]) -> Written | str | None:
        if not isinstance(job.share, RankShard):
            return job.share
        try:
            return work(job.share)
        except Exception as error:  # of any type: the other ranks wait for this rank's report
            return self._ranks.named(error)

    def _keep(self, job: SaveJob, written: list[Written | str | None]) -> SaveOutcome:
        """Keep the snapshot in memory; a failure ends the copies on all ranks. Collective."""
        memory = self._memory
        if memory is None:
            raise ValueError("no memory to keep a snapshot in")

        def content() -> bytes | str | SaveOutcome:
            try:
                self._still_mine()
                records = self._index_in_memory(job, written)
                manifest = self._store.new_manifest(job.step, records, len(written), job.meta)
                return encode_manifest(manifest)
            except OwnedByAnotherAttempt as error:
                return SaveOutcome(False, job.step, error=str(error), fenced=True, in_memory=True)
            except CheckpointError as error:
                return str(error)

        found = self._ranks.from_rank_0(content)
        trouble: str | None = None
        if isinstance(found, SaveOutcome):
            memory.active = False  # the memory belongs to the newer attempt
            return found
        if isinstance(found, str):
            trouble = found
            memory.end(trouble)
        else:
            index = self._index if self._ranks.rank == 0 else None
            size = job.share.size if isinstance(job.share, RankShard) and job.share.safe else 0
            trouble = memory.keep(MemorySnapshot(job.step, found, index), size, self._ranks)
        if trouble is not None:
            trouble = f"no copies of the saves stay in memory from here on: {trouble}"
        return SaveOutcome(trouble is None, job.step, error=trouble, in_memory=True)

    def _index_in_memory(
        self, job: SaveJob, written: list[Written | str | None]
    ) -> list[FileRecord]:
        """Return the records of all files, those of the index included."""
        troubles = [part for part in written if isinstance(part, str)]
        if troubles or job.plan is None:
            raise CheckpointError(first_of(troubles or ["a rank has no snapshot"]))
        whole = [part for part in written if isinstance(part, Written)]
        if not job.disk:
            self._index = encode(make_index(job.plan.placed, whole))
        digest = xxhash.xxh3_128_hexdigest(self._index)
        return [*(part.record for part in whole), FileRecord(INDEX, len(self._index), digest)]

    def _conclude(
        self, job: SaveJob, draft: Path, written: list[Written | str | None]
    ) -> SaveOutcome:
        troubles = [part for part in written if isinstance(part, str)]
        if troubles:
            outcome = SaveOutcome(False, job.step, error=first_of(troubles))
        else:
            outcome = self._commit(
                job, draft, [part for part in written if isinstance(part, Written)]
            )
        notes = [*self._left, *outcome.notes]
        try:
            if outcome.ok:
                self._tidy(job.step)
            else:
                self._store.abandon(draft)
        except CheckpointError as error:
            self._swept = False
            notes.append(self._ranks.named(error))
        return replace(outcome, notes=tuple(notes))

    def _commit(self, job: SaveJob, draft: Path, written: list[Written]) -> SaveOutcome:
        step, plan = job.step, job.plan
        if plan is None:
            raise ValueError("a shard without a plan")
        try:
            records = [part.record for part in written]
            self._index = encode(make_index(plan.placed, written))
            records.append(self._write_index(draft, self._index))
            path = self._store.commit(
                draft, step, records, len(written), job.meta, self._still_mine
            )
        except OwnedByAnotherAttempt as error:
            return SaveOutcome(False, step, error=str(error), fenced=True)
        except (CheckpointError, OSError) as error:
            return SaveOutcome(False, step, error=self._ranks.named(error))
        sizes = [record.size for record in records]
        found = self._store.striping_advice(step, max(sizes))
        notes = () if found is None else (found,)
        return SaveOutcome(True, step, path, bytes=sum(sizes), notes=notes)

    def _write_index(self, draft: Path, index: bytes) -> FileRecord:
        with self._store.open_file(draft, INDEX) as stream:
            stream.write(index)
        if stream.record is None:
            raise CheckpointError(f"{draft / INDEX}: was not written")
        return stream.record


def make_index(placed: Sequence[PlacedTensor], written: Sequence[Written]) -> Index:
    """Return the index, from the writers of each tensor and the reports of all ranks.

    Raises:
        CheckpointError: a rank has not written what the plan says.
    """
    tensors = {tensor.name: TensorEntry(tensor.dtype, tensor.shape, ()) for tensor in placed}
    next_span = [0] * len(written)
    for tensor in sorted(placed, key=lambda each: file_order(each.dtype, each.name)):
        pieces, element = [], width(tensor.dtype)
        for (offsets, sizes), writer in zip(tensor.boxes, tensor.writers, strict=True):
            file, number = written[writer], next_span[writer]
            next_span[writer] += 1
            position, length = file.spans[number]
            if length != math.prod(sizes) * element:
                raise CheckpointError(f"{file.record.name}: {tensor.name}: has {length} bytes")
            place = Place(file.record.name, position, length, file.hashes[number])
            pieces.append(Piece(offsets, sizes, place))
        tensors[tensor.name] = TensorEntry(tensor.dtype, tensor.shape, tuple(pieces))
    blobs: dict[str, Place] = {}
    for file, first in zip(written, next_span, strict=True):
        spans = zip(file.spans[first:], file.hashes[first:], strict=True)
        places = [Place(file.record.name, *span, digest) for span, digest in spans]
        blobs |= zip(file.blobs, places, strict=True)
    return Index(tensors, blobs)
