"""Restore on all ranks: if one rank finds damage, all ranks fall back to the previous checkpoint.

The page cache or the memory of a single node may be wrong. A checkpoint that only one node cannot read is
valid, and a fallback would lose its progress.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpcrun.checkpoint.outcome import Restored
from hpcrun.checkpoint.sharded.copies import Copies
from hpcrun.checkpoint.sharded.rank_file import StoreReader, own_name
from hpcrun.checkpoint.state.tree import join, split
from hpcrun.errors import one_line
from hpcrun.printing import BAR_DELAY, progress_bar
from hpcrun.ranks.collective import Ranks, first_of
from hpcrun.storage.errors import (
    CheckpointError,
    DamagedCheckpoint,
    ReadFailure,
    refused_to_read,
)
from hpcrun.storage.index import INDEX, TensorEntry
from hpcrun.storage.manifest import MANIFEST, Manifest
from hpcrun.storage.store import CheckpointStore

SHARED = "shared"

Template = Callable[[Mapping[str, TensorEntry], Any], dict[str, Any]]
"""Function that returns the tensors to load into, from a checkpoint's tensors and its plain data.

Raises CheckpointError if the checkpoint does not fit; nothing is loaded then.
"""


def restore(
    store: CheckpointStore,
    ranks: Ranks,
    template: Template,
    skip: Collection[int] = (),
) -> Restored | None:
    """Restore the newest checkpoint that every rank can read; None if there is none. Collective.

    Rank 0 reads the manifest and the index for all ranks. Of the ranks that hold a tensor, one
    reads it and compares it with its hash. Only after all ranks have read their part without trouble, they
    broadcast it. If a rank finds damage and rank 0 confirms it, all ranks fall back to the previous
    checkpoint. No other problem causes a fallback: the newest checkpoint stays the newest. Tensors of
    ``template`` are filled in place; other tensors are loaded whole on the CPU.

    Args:
        skip: steps to ignore.

    Raises:
        ReadFailure: a node failed to read a checkpoint that is not known to be damaged. On all ranks.
        CheckpointError: all checkpoints are damaged (a silent restart could cost weeks), or the state does
            not fit. On all ranks. If the state does not fit, nothing was loaded; otherwise the tensors of
            the template may have any content.
    """
    skipped, notes = set(skip), []
    while True:
        choice = ranks.from_rank_0(lambda: _choose(store, ranks, skipped))
        notes += choice.notes
        if choice.unread:
            raise ReadFailure(_elsewhere(choice.unread), here=ranks.rank == 0)
        if choice.error is not None:
            raise CheckpointError(choice.error)
        if choice.found is None:
            if notes:
                raise CheckpointError(_none_whole(store, notes, bool(skip)))
            return None
        manifest, index = choice.found
        load = _Load(store, ranks, manifest, index, template)
        path = store.path(manifest.step)
        reports = ranks.gather(_report(load.prepare, ranks, path))
        if not any(report.trouble for report in reports):
            load.divide()
            reports = ranks.gather(_report(load.read, ranks, path))
        misfits = [report.misfit for report in reports if report.misfit]
        if misfits:
            place = f"step {manifest.step} in {store.root}"
            raise CheckpointError(f"{place}: {first_of(misfits)}")
        if not any(report.trouble for report in reports):
            load.spread()
            return load.restored(notes)
        failed = ranks.from_rank_0(partial(_at_fault, store, ranks, manifest.step, reports))
        if failed is not None:
            where, line = failed
            text = _elsewhere(f"step {manifest.step}: {line}")
            raise ReadFailure(text, here=ranks.rank in where)
        skipped.add(manifest.step)
        troubles = [report.trouble for report in reports if report.trouble]
        notes.append(f"step {manifest.step} skipped: {first_of(troubles)}")


class _Choice(NamedTuple):
    """Result of the search: the newest checkpoint with the content of its index, and notes on skipped steps.

    ``unread``: the error of a file that could not be read.
    """

    found: tuple[Manifest, bytes] | None
    notes: list[str]
    unread: str | None = None
    error: str | None = None


def _choose(store: CheckpointStore, ranks: Ranks, skipped: set[int]) -> _Choice:
    notes: list[str] = []
    try:
        store.require_private()
        for step in store.steps():
            if step in skipped:
                continue
            try:
                return _Choice(_read_index(store, step), notes)
            except DamagedCheckpoint as damage:
                if refused_to_read(damage):
                    raise
                skipped.add(step)
                notes.append(f"step {step} skipped: {ranks.named(damage)}")
        return _Choice(None, notes)
    except CheckpointError as error:
        line = ranks.named(error)
        if refused_to_read(error):
            return _Choice(None, notes, unread=line)
        return _Choice(None, notes, error=line)


def _read_index(store: CheckpointStore, step: int) -> tuple[Manifest, bytes]:
    """Read manifest, file sizes and index of ``step``; read again on damage. Raises CheckpointError."""

    def once() -> tuple[Manifest, bytes]:
        manifest = store.inspect(step)
        store.require_private([step])
        return manifest, store.read(step, INDEX)

    try:
        return once()
    except DamagedCheckpoint as damage:
        if refused_to_read(damage):
            raise
        require_whole(store, step, [damage.file] if damage.file else [])
    return once()


def _at_fault(
    store: CheckpointStore, ranks: Ranks, step: int, reports: Sequence["_Report"]
) -> tuple[list[int], str] | None:
    """Return the ranks that failed to read ``step``, with the error; None if the step is damaged or gone.

    Called on rank 0, which checks again the files that other ranks report as damaged.
    """
    with suppress(CheckpointError):
        if step not in store.steps():  # NFS calls an open file stale if a training prunes it
            return None
    unread = {rank: report.unread for rank, report in enumerate(reports) if report.unread}
    if unread:
        return list(unread), first_of(list(unread.values()))
    claims = {rank: report for rank, report in enumerate(reports) if report.damage}
    files = dict.fromkeys(report.file for report in claims.values())
    if None in files:
        # All ranks have the same index, and its bytes are unchanged: it was written wrong.
        store.prove(step)
        return None
    try:
        require_whole(store, step, [name for name in files if name])
    except DamagedCheckpoint as damage:
        return ([0], ranks.named(damage)) if refused_to_read(damage) else None
    first = first_of([report.damage or "" for report in claims.values()])
    return list(claims), f"{first}; {ranks.named('reads the same files without damage')}"


def _elsewhere(trouble: str) -> str:
    return (
        f"{trouble}; the checkpoint is kept, and another node may be able to read it; if no node "
        "can, run `hpcrun verify` to see the damage"
    )


def _none_whole(store: CheckpointStore, notes: Sequence[str], chosen: bool) -> str:
    line = f"{store.root}: no checkpoint is valid: {'; '.join(notes)}"
    if chosen:
        return line
    return f"{line}; to start from step 0, move the folder away or submit a run with another --name"


class _Load:
    """A rank's part of a restore: ``prepare`` can refuse without side effects, ``read`` changes tensors.

    ``divide`` and ``spread`` are collective: each tensor is read by one of the ranks that hold it.
    """

    def __init__(
        self,
        store: CheckpointStore,
        ranks: Ranks,
        manifest: Manifest,
        index: bytes,
        template: Template,
    ) -> None:
        self._store, self._ranks = store, ranks
        self._manifest, self._index, self._template = manifest, index, template
        self._tensors: dict[str, torch.Tensor] = {}
        self._mine: dict[str, torch.Tensor] = {}
        self._skeleton: Any = None
        self._own: dict[str, Any] | None = None

    def prepare(self) -> None:
        """Read the plain data, and choose the target of each tensor."""
        reader = self._reader = StoreReader(self._store, self._manifest.step, self._index)
        self._skeleton = reader.blob(SHARED)
        if self._manifest.world_size == self._ranks.world_size:
            self._own = reader.blob(own_name(self._ranks.rank))
        entries = reader.index.tensors
        _, here = split(self._template(entries, self._skeleton))
        self._tensors = {
            name: here[name] if name in here else reader.empty(name) for name in entries
        }
        reader.require_fit(self._tensors)
        self._copies = Copies(self._tensors, self._ranks, reader.position)
        self._mine = self._tensors

    def divide(self) -> None:
        """Divide the reading among the ranks that hold the same tensors. Collective."""
        # The ranks of another program, such as the stages of a pipeline, may hold different tensors.
        if len(set(self._ranks.gather(self._copies.key))) == 1:
            self._mine = self._copies.divide()

    def read(self) -> None:
        """Load this rank's part of the tensors; rank 0 shows a bar on a terminal."""
        if self._ranks.rank:
            self._reader.load(self._mine)
            return
        with progress_bar("B", text=f"restore step {self._manifest.step}", delay=BAR_DELAY) as bar:
            self._reader.load(self._mine, bar.move)

    def spread(self) -> None:
        """Broadcast the tensors that each rank has read. Collective."""
        self._copies.spread()

    def restored(self, notes: list[str]) -> Restored:
        """Return the restored state."""
        manifest, world_size = self._manifest, self._ranks.world_size
        if self._own is None:
            notes.append(
                f"step {manifest.step} was saved by {manifest.world_size} ranks and is resumed by "
                f"{world_size}: the ranks' random states are not restored"
            )
        shared = join(self._skeleton, self._tensors)
        step, meta = manifest.step, dict(manifest.meta)
        return Restored(step, shared, self._own, meta, tuple(notes), committed=step)


class _Report(NamedTuple):
    """Report of a rank: damage with its file, or a refused read, or another error (``misfit``)."""

    damage: str | None = None
    file: str | None = None
    unread: str | None = None
    misfit: str | None = None

    @property
    def trouble(self) -> str | None:
        return self.damage or self.unread or self.misfit


def _report(work: Callable[[], None], ranks: Ranks, path: Path) -> _Report:
    try:
        work()
    except DamagedCheckpoint as error:
        if refused_to_read(error):
            return _Report(unread=ranks.named(error))
        return _Report(ranks.named(error), error.file)
    except CheckpointError as error:
        return _Report(misfit=ranks.named(error))
    except Exception as error:  # of any type: the other ranks wait for this rank's report
        line = f"{path}: cannot be loaded here: {one_line(error)}"
        return _Report(misfit=ranks.named(line))
    return _Report()


def require_whole(store: CheckpointStore, step: int, names: Collection[str]) -> None:
    """Read the files ``names`` of ``step`` again, from the disk where the kernel allows; for rank 0.

    Raises:
        DamagedCheckpoint: a file is damaged (``store`` then records it as proven), or the file system
            refuses to read it.
    """
    try:
        for name in (MANIFEST, INDEX, *names):
            store.drop_cache(step, name)
        store.inspect(step)
        StoreReader(store, step).require(names)
    except DamagedCheckpoint as damage:
        if not refused_to_read(damage):
            store.prove(step)
        raise
