"""The ranks save and restore together: one fails, all know; one finds damage, all fall back.

A failed writer that the others do not hear of ends in a manifest over missing files, so every save
gathers what each rank wrote before rank 0 commits, and every restore reduces what each rank read before
anyone uses it. No trouble of one rank's disk leaves that rank as an exception while the others
wait in a collective.
"""

import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hpcrun.checkpoint.errors import CheckpointError
from hpcrun.checkpoint.manifest import FileRecord, Manifest
from hpcrun.checkpoint.store import CheckpointStore
from hpcrun.run.owner import Superseded

SHARED = "shared.pt"


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended, the same on all ranks but for ``seconds`` (wall time on this one).

    ``error`` says why it failed, naming the rank; ``fenced`` that a newer incarnation owns the run, so
    that this one must stop. ``bytes`` counts all files; ``notes`` tells what went wrong after the commit.
    """

    ok: bool
    step: int
    path: Path | None = None
    error: str | None = None
    seconds: float = 0.0
    bytes: int = 0
    fenced: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Restored:
    """What a restore found: the shared state, this rank's own, and what to tell the user.

    ``own`` is None where the number of ranks has changed. ``notes`` names every damaged file on
    the way, the same on all ranks.
    """

    step: int
    shared: dict[str, Any]
    own: dict[str, Any] | None
    meta: dict[str, Any]
    notes: tuple[str, ...]


class Writer(Protocol):
    """What the training loop needs; both methods are collective over all ranks."""

    def save(
        self, step: int, shared: dict[str, Any], own: dict[str, Any], meta: dict[str, Any]
    ) -> SaveOutcome:
        """Save the state after ``step``; see :class:`SynchronousWriter`."""
        ...

    def restore(self, skip: Collection[int] = ()) -> Restored | None:
        """The newest state that every rank can read; see :class:`SynchronousWriter`."""
        ...


class SynchronousWriter:
    """Writes ``shared.pt`` on rank 0 and ``rank-00003.pt`` on each rank while training waits.

    Args:
        group: a process group of all ranks, gloo for preference; None is the default one, and none
            is needed for a single rank.
        still_mine: raises :class:`Superseded` when a newer incarnation owns the run; asked by rank 0.
        keep: committed checkpoints that stay after a save.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
        still_mine: Callable[[], None],
        keep: int = 3,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self._still_mine = still_mine
        self._keep = keep
        self._swept = False

    def save(
        self, step: int, shared: dict[str, Any], own: dict[str, Any], meta: dict[str, Any]
    ) -> SaveOutcome:
        """Save the state after ``step``. Collective; returns on all ranks once it is decided.

        The first save also sweeps what dead incarnations left, each successful one prunes.

        Args:
            shared: the same for all ranks; only rank 0's is written.
            own: this rank's.
            meta: plain JSON for the manifest; only rank 0's is written.
        """
        started = time.perf_counter()
        draft = self._from_rank_0(lambda: self._begin(step))
        if isinstance(draft, SaveOutcome):
            outcome = draft
        else:
            written = self._gather(self._write(self._store.root / draft, shared, own))
            outcome = self._from_rank_0(lambda: self._conclude(step, draft, written, meta))
        return replace(outcome, seconds=time.perf_counter() - started)

    def restore(self, skip: Collection[int] = ()) -> Restored | None:
        """The newest checkpoint that every rank can read, or None if there is none. Collective.

        Each rank compares what it reads with the manifest; damage that any of them finds makes
        all fall back to the checkpoint before.

        Args:
            skip: steps not to consider.

        Raises:
            CheckpointError: there are checkpoints and none is whole (starting over in silence could
                cost weeks), or their folder cannot be read. On all ranks.
        """
        skipped, notes = set(skip), []
        while True:
            manifest, found, error = self._from_rank_0(lambda: self._choose(skipped))
            notes += found
            if error is None and manifest is None and notes:
                error = (
                    f"{self._store.root}: no checkpoint there is whole: {'; '.join(notes)}; move the "
                    "folder away to start from step 0"
                )
            if error is not None:
                raise CheckpointError(error)
            if manifest is None:
                return None
            shared, own, trouble = self._read(manifest)
            troubles = [text for text in self._gather(trouble) if text]
            if not troubles:
                return self._restored(manifest, shared, own, notes)
            self._store.distrust(manifest.step)
            skipped.add(manifest.step)
            notes.append(f"step {manifest.step} passed over: {_first(troubles)}")

    # Saving, on this rank

    def _begin(self, step: int) -> str | SaveOutcome:
        try:
            self._still_mine()
            if not self._swept:
                self._store.sweep()
                self._swept = True
            return self._store.begin(step).name
        except Superseded as error:
            return SaveOutcome(False, step, error=str(error), fenced=True)
        except (CheckpointError, OSError) as error:
            return SaveOutcome(False, step, error=self._named(error))

    def _write(
        self, draft: Path, shared: dict[str, Any], own: dict[str, Any]
    ) -> list[FileRecord] | str:
        files = {SHARED: shared} if self._rank == 0 else {}
        files[_own_name(self._rank)] = own
        records = []
        try:
            for name, state in files.items():
                with self._store.open_file(draft, name) as stream:
                    torch.save(state, stream)  # type: ignore[arg-type]
                if stream.record is not None:
                    records.append(stream.record)
        except Exception as error:  # whatever it is, the others are waiting to hear
            return self._named(error)
        return records

    def _conclude(
        self,
        step: int,
        draft_name: str,
        written: list[list[FileRecord] | str],
        meta: dict[str, Any],
    ) -> SaveOutcome:
        draft = self._store.root / draft_name
        troubles = [part for part in written if isinstance(part, str)]
        records = [record for part in written if not isinstance(part, str) for record in part]
        outcome = SaveOutcome(False, step)
        if troubles:
            outcome = replace(outcome, error=_first(troubles))
        else:
            outcome = self._commit(step, draft, records, meta)
        try:
            if outcome.ok:
                self._store.prune(self._keep, protect=[step])
            else:
                self._store.abandon(draft)
        except CheckpointError as error:
            outcome = replace(outcome, notes=(self._named(error),))
        return outcome

    def _commit(
        self, step: int, draft: Path, records: list[FileRecord], meta: dict[str, Any]
    ) -> SaveOutcome:
        try:
            path = self._store.commit(
                draft, step, records, self._world_size, meta, self._still_mine
            )
        except Superseded as error:
            return SaveOutcome(False, step, error=str(error), fenced=True)
        except (CheckpointError, OSError) as error:
            return SaveOutcome(False, step, error=self._named(error))
        return SaveOutcome(True, step, path, bytes=sum(record.size for record in records))

    # Restoring, on this rank

    def _choose(self, skipped: set[int]) -> tuple[Manifest | None, list[str], str | None]:
        notes: list[str] = []

        def report(step: int, why: str) -> None:
            skipped.add(step)
            notes.append(f"step {step} passed over: {why}")

        try:
            return self._store.newest_valid(skipped, report), notes, None
        except CheckpointError as error:
            return None, notes, self._named(error)

    def _read(self, manifest: Manifest) -> tuple[dict[str, Any], dict[str, Any] | None, str | None]:
        names = [SHARED]
        if manifest.world_size == self._world_size:
            names.append(_own_name(self._rank))
        path = self._store.path(manifest.step)
        states = []
        try:
            self._store.check(manifest.step, names)
            for name in names:
                path = self._store.path(manifest.step) / name
                states.append(torch.load(path, map_location="cpu", weights_only=True))
        except CheckpointError as error:
            return {}, None, self._named(error)
        except UnpicklingError:
            # torch's own text advises to load it all the same, running whatever is in it.
            return {}, None, self._named(f"{path}: holds more than tensors and plain data")
        except Exception as error:  # whatever it is, the others are waiting to hear
            return {}, None, self._named(f"{path}: cannot be loaded: {_line(error)}")
        return states[0], states[1] if len(states) > 1 else None, None

    def _restored(
        self,
        manifest: Manifest,
        shared: dict[str, Any],
        own: dict[str, Any] | None,
        notes: list[str],
    ) -> Restored:
        if own is None:
            notes.append(
                f"step {manifest.step} was saved by {manifest.world_size} ranks and is resumed by "
                f"{self._world_size}: the ranks' random states are not restored"
            )
        return Restored(manifest.step, shared, own, dict(manifest.meta), tuple(notes))

    # Together

    def _from_rank_0(self, compute: Callable[[], Any]) -> Any:
        value, failure = None, None
        if self._rank == 0:
            try:
                value = compute()
            except Exception as error:  # the others must not wait for a rank 0 that has left
                failure = error
        if self._world_size > 1:
            box = [value, None if failure is None else self._named(failure)]
            dist.broadcast_object_list(box, src=0, group=self._group)
            value, told = box
            if told is not None and failure is None:
                failure = CheckpointError(told)
        if failure is not None:
            raise failure
        return value

    def _gather(self, value: Any) -> list[Any]:
        values = [value]
        if self._world_size > 1:
            values = [None] * self._world_size
            dist.all_gather_object(values, value, group=self._group)
        return values

    def _named(self, trouble: Exception | str) -> str:
        text = trouble if isinstance(trouble, str) else _line(trouble)
        return f"rank {self._rank} ({socket.gethostname()}): {text}"


def _own_name(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _first(troubles: list[str]) -> str:
    others = len(troubles) - 1
    return troubles[0] + (f" (and {others} more)" if others else "")


def _line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"
