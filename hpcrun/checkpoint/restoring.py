"""The ranks restore together: one finds damage, all fall back to the checkpoint before."""

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpcrun.checkpoint.errors import CheckpointError, DamagedCheckpoint
from hpcrun.checkpoint.holds import hold
from hpcrun.checkpoint.index import INDEX, TensorEntry
from hpcrun.checkpoint.manifest import Manifest
from hpcrun.checkpoint.outcome import Restored
from hpcrun.checkpoint.reading import StoreReader
from hpcrun.checkpoint.share import own_name
from hpcrun.checkpoint.store import CheckpointStore
from hpcrun.checkpoint.together import Together, first_of, one_line
from hpcrun.checkpoint.tree import join, split

SHARED = "shared"

Template = Callable[[Mapping[str, TensorEntry], Any], dict[str, Any]]
"""From a checkpoint's tensors and the plain rest to a state whose tensors they are loaded into.

Raises CheckpointError where the checkpoint does not fit; nothing has been loaded then.
"""


def restore(
    store: CheckpointStore,
    together: Together,
    template: Template,
    skip: Collection[int] = (),
) -> Restored | None:
    """The newest checkpoint that every rank can read, or None if there is none. Collective.

    Rank 0 reads the manifest and the index for all ranks.
    Each rank compares what it reads with the hashes; damage that any of them finds makes all fall
    back to the checkpoint before; nothing else does: what was saved stays the newest, whatever keeps it
    from being loaded here. Tensors of ``template`` are filled in place, those it lacks come whole on the
    CPU.

    Args:
        skip: steps not to consider.

    Raises:
        CheckpointError: there are checkpoints and none is whole (starting over in silence could
            cost weeks), their folder cannot be read, or the state does not fit. On all ranks. Where
            it does not fit, nothing was loaded; otherwise the template's tensors may hold anything.
    """
    skipped, notes = set(skip), []
    while True:
        chosen, found, error = together.from_rank_0(lambda: _choose(store, together, skipped))
        notes += found
        if error is None and chosen is None and notes:
            error = f"{store.root}: no checkpoint there is whole: {'; '.join(notes)}"
            if not skip:
                error += (
                    "; to start from step 0 move the folder away, or give the run's `hpcrun resume` "
                    "--from-scratch"
                )
        if error is not None:
            raise CheckpointError(error)
        if chosen is None:
            return None
        manifest, index = chosen
        # Another process may be training here: a job that only evaluates, or a ghost of this one.
        with hold(store.root, manifest.step) if together.rank == 0 else nullcontext():
            load = _Load(store, together, manifest, index, template)
            for work in (load.prepare, load.fill):
                reports = together.gather(_report(work, together, store.path(manifest.step)))
                if any(report.damage or report.misfit for report in reports):
                    break
        misfits = [report.misfit for report in reports if report.misfit]
        if misfits:
            raise CheckpointError(f"step {manifest.step}: {first_of(misfits)}")
        troubles = [report.damage for report in reports if report.damage]
        if not troubles:
            return load.restored(notes)
        store.distrust(manifest.step, lasting=any(report.lasting for report in reports))
        skipped.add(manifest.step)
        notes.append(f"step {manifest.step} passed over: {first_of(troubles)}")


def _choose(
    store: CheckpointStore, together: Together, skipped: set[int]
) -> tuple[tuple[Manifest, bytes] | None, list[str], str | None]:
    """The newest checkpoint with the content of its index, what was passed over, and what went wrong."""
    notes: list[str] = []

    def report(step: int, why: str) -> None:
        skipped.add(step)
        notes.append(f"step {step} passed over: {why}")

    try:
        store.require_private()
        while (manifest := store.newest_valid(skipped, report)) is not None:
            store.require_private([manifest.step])
            try:
                return (manifest, store.read(manifest.step, INDEX)), notes, None
            except DamagedCheckpoint as damage:
                report(manifest.step, together.named(damage))
        return None, notes, None
    except CheckpointError as error:
        return None, notes, together.named(error)


class _Load:
    """One rank's part of a restore: what can be refused first, and then what cannot be taken back."""

    def __init__(
        self,
        store: CheckpointStore,
        together: Together,
        manifest: Manifest,
        index: bytes,
        template: Template,
    ) -> None:
        self._store, self._together = store, together
        self._manifest, self._index, self._template = manifest, index, template
        self._tensors: dict[str, torch.Tensor] = {}
        self._skeleton: Any = None
        self._own: dict[str, Any] | None = None

    def prepare(self) -> None:
        """Read the plain data, and find where each tensor goes."""
        reader = self._reader = StoreReader(self._store, self._manifest.step, self._index)
        self._skeleton = reader.blob(SHARED)
        if self._manifest.world_size == self._together.world_size:
            self._own = reader.blob(own_name(self._together.rank))
        entries = reader.index.tensors
        _, here = split(self._template(entries, self._skeleton))
        self._tensors = {
            name: here[name] if name in here else reader.empty(name) for name in entries
        }
        reader.require_fit(self._tensors)

    def fill(self) -> None:
        """Read the tensors."""
        self._reader.load(self._tensors)

    def restored(self, notes: list[str]) -> Restored:
        """What was read."""
        manifest, world_size = self._manifest, self._together.world_size
        if self._own is None:
            notes.append(
                f"step {manifest.step} was saved by {manifest.world_size} ranks and is resumed by "
                f"{world_size}: the ranks' random states are not restored"
            )
        shared = join(self._skeleton, self._tensors)
        return Restored(manifest.step, shared, self._own, dict(manifest.meta), tuple(notes))


class _Report(NamedTuple):
    """The damage that a rank met, whether it lasts, and what else kept the rank from its work."""

    damage: str | None = None
    lasting: bool = False
    misfit: str | None = None


def _report(work: Callable[[], None], together: Together, path: Path) -> _Report:
    try:
        work()
    except DamagedCheckpoint as error:
        return _Report(together.named(error), error.lasting)
    except CheckpointError as error:
        return _Report(misfit=together.named(error))
    except Exception as error:  # whatever it is, the others are waiting to hear
        line = f"{path}: cannot be loaded here: {one_line(error)}"
        return _Report(misfit=together.named(line))
    return _Report()
