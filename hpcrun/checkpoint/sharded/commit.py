"""The steps of a save on all ranks: write, agree, commit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpcrun.checkpoint.outcome import SaveOutcome
from hpcrun.checkpoint.sharded.plan import TensorChunk, WritePlan
from hpcrun.checkpoint.sharded.rank_file import RankShard, Written, write
from hpcrun.checkpoint.storage.errors import CheckpointError, amount
from hpcrun.checkpoint.storage.index import INDEX, Index, Piece, Place, TensorEntry, encode
from hpcrun.checkpoint.storage.manifest import FileRecord
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.ranks.collective import Ranks, first_of
from hpcrun.run.record import OwnedByAnotherAttempt


@dataclass(frozen=True)
class SaveJob:
    """A rank's part of a save.

    Attributes:
        share: the shard; or the error line if this rank has none; or None if another rank failed.
        meta: plain JSON for the manifest; rank 0's is used.
    """

    step: int
    plan: WritePlan | None
    share: RankShard | str | None
    meta: Mapping[str, Any]


class CommitProtocol:
    """The steps of a save, which all ranks take together.

    Args:
        still_mine: raises OwnedByAnotherAttempt if a newer attempt owns the run; called on rank 0.
        after_commit: called by rank 0 after the commit of a step; its result is reported to the user.
    """

    def __init__(
        self,
        store: CheckpointStore,
        ranks: Ranks,
        still_mine: Callable[[], None],
        after_commit: Callable[[int], list[str]],
    ) -> None:
        self._store = store
        self._ranks = ranks
        self._still_mine = still_mine
        self._tidy = after_commit
        self._swept = False
        self._left: list[str] = []

    def run(self, job: SaveJob) -> SaveOutcome:
        """Commit, and return the same result on all ranks; disk errors are part of the result. Collective.

        The first save, and the save after a failed cleanup, also remove leftovers of dead attempts.

        Raises:
            RuntimeError: another rank is gone (torch.distributed).
        """
        begun = self._ranks.from_rank_0(lambda: self._begin(job))
        if isinstance(begun, SaveOutcome):
            return begun
        draft = self._store.root / begun
        work = partial(write, store=self._store, draft=draft, rank=self._ranks.rank)
        written = self._ranks.to_rank_0(self._report(job, work))
        return self._ranks.from_rank_0(lambda: self._conclude(job, draft, written))

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
        notes = [*self._left]
        try:
            if outcome.ok:
                notes += self._tidy(job.step)
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
            records.append(self._write_index(draft, encode(make_index(plan.everyone, written))))
            path = self._store.commit(
                draft, step, records, len(written), job.meta, self._still_mine
            )
        except OwnedByAnotherAttempt as error:
            return SaveOutcome(False, step, error=str(error), fenced=True)
        except (CheckpointError, OSError) as error:
            return SaveOutcome(False, step, error=self._ranks.named(error))
        return SaveOutcome(True, step, path, bytes=sum(record.size for record in records))

    def _write_index(self, draft: Path, index: bytes) -> FileRecord:
        with self._store.open_file(draft, INDEX) as stream:
            stream.write(index)
        if stream.record is None:
            raise CheckpointError(f"{draft / INDEX}: was not written")
        return stream.record


def make_index(everyone: tuple[tuple[TensorChunk, ...], ...], written: list[Written]) -> Index:
    """Return the index, from the planned parts of each rank and its report."""
    # Lists: growing a tuple per rank would take quadratic time in the number of ranks.
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    blobs: dict[str, Place] = {}
    for parts, file in zip(everyone, written, strict=True):
        places = [
            Place(file.record.name, position, length, digest)
            for (position, length), digest in zip(file.spans, file.hashes, strict=True)
        ]
        for part, place in zip(parts, places[: len(parts)], strict=True):
            kinds.setdefault(part.name, (part.dtype, part.shape))
            found = pieces.setdefault(part.name, [])
            if place.length or part.sizes == part.shape:
                found.append(Piece(part.offsets, part.sizes, place))
        blobs |= zip(file.blobs, places[len(parts) :], strict=True)
    tensors = {
        name: TensorEntry(dtype, shape, tuple(pieces[name]))
        for name, (dtype, shape) in kinds.items()
    }
    return Index(tensors, blobs)
