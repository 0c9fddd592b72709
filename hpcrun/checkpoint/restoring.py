"""The ranks restore together: one finds damage, all fall back to the checkpoint before."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

from hpcrun.checkpoint.errors import CheckpointError, DamagedCheckpoint
from hpcrun.checkpoint.holds import hold
from hpcrun.checkpoint.manifest import Manifest
from hpcrun.checkpoint.outcome import Restored
from hpcrun.checkpoint.reading import StoreReader
from hpcrun.checkpoint.share import own_name
from hpcrun.checkpoint.store import CheckpointStore
from hpcrun.checkpoint.together import Together, first_of, one_line
from hpcrun.checkpoint.tree import join, split

SHARED = "shared"

Template = Callable[[Collection[str]], dict[str, Any]]
"""From the names of the tensors in a checkpoint to a state whose tensors they are loaded into."""


@dataclass(frozen=True)
class _Part:
    shared: dict[str, Any]
    own: dict[str, Any] | None
    damage: str | None = None
    misfit: str | None = None


def restore(
    store: CheckpointStore,
    together: Together,
    template: Template,
    skip: Collection[int] = (),
) -> Restored | None:
    """The newest checkpoint that every rank can read, or None if there is none. Collective.

    Each rank compares what it reads with the hashes; damage that any of them finds makes all fall
    back to the checkpoint before. Tensors of ``template`` are filled in place, those it lacks come whole
    on the CPU.

    Args:
        skip: steps not to consider.

    Raises:
        CheckpointError: there are checkpoints and none is whole (starting over in silence could
            cost weeks), their folder cannot be read, or the state does not fit. On all ranks; the
            template's tensors may hold anything then.
    """
    skipped, notes = set(skip), []
    while True:
        manifest, found, error = together.from_rank_0(lambda: _choose(store, together, skipped))
        notes += found
        if error is None and manifest is None and notes:
            error = f"{store.root}: no checkpoint there is whole: {'; '.join(notes)}"
            if not skip:
                error += "; move the folder away to start from step 0"
        if error is not None:
            raise CheckpointError(error)
        if manifest is None:
            return None
        # Another process may be training here: a job that only evaluates, or a ghost of this one.
        with hold(store.root, manifest.step) if together.rank == 0 else nullcontext():
            part = _read(store, together, manifest, template)
            reports = together.gather((part.damage, part.misfit))
        misfits = [misfit for _, misfit in reports if misfit]
        if misfits:
            raise CheckpointError(f"step {manifest.step}: {first_of(misfits)}")
        troubles = [damage for damage, _ in reports if damage]
        if not troubles:
            return _restored(together, manifest, part, notes)
        store.distrust(manifest.step)
        skipped.add(manifest.step)
        notes.append(f"step {manifest.step} passed over: {first_of(troubles)}")


def _choose(
    store: CheckpointStore, together: Together, skipped: set[int]
) -> tuple[Manifest | None, list[str], str | None]:
    notes: list[str] = []

    def report(step: int, why: str) -> None:
        skipped.add(step)
        notes.append(f"step {step} passed over: {why}")

    try:
        store.require_private()
        manifest = store.newest_valid(skipped, report)
        if manifest is not None:
            store.require_private([manifest.step])
        return manifest, notes, None
    except CheckpointError as error:
        return None, notes, together.named(error)


def _read(
    store: CheckpointStore, together: Together, manifest: Manifest, template: Template
) -> _Part:
    path = store.path(manifest.step)
    own = None
    try:
        reader = StoreReader(store, manifest.step)
        skeleton = reader.blob(SHARED)
        if manifest.world_size == together.world_size:
            own = reader.blob(own_name(together.rank))
        _, here = split(template(reader.index.tensors.keys()))
        tensors = {
            name: here[name] if name in here else reader.empty(name)
            for name in reader.index.tensors
        }
        reader.load(tensors)
        return _Part(join(skeleton, tensors), own)
    except DamagedCheckpoint as error:
        return _Part({}, None, damage=together.named(error))
    except CheckpointError as error:
        return _Part({}, None, misfit=together.named(error))
    except UnpicklingError:
        # torch's own text advises to load it all the same, running whatever is in it.
        return _Part({}, None, together.named(f"{path}: holds more than tensors and plain data"))
    except Exception as error:  # whatever it is, the others are waiting to hear
        return _Part({}, None, together.named(f"{path}: cannot be loaded: {one_line(error)}"))


def _restored(together: Together, manifest: Manifest, part: _Part, notes: list[str]) -> Restored:
    if part.own is None:
        notes.append(
            f"step {manifest.step} was saved by {manifest.world_size} ranks and is resumed by "
            f"{together.world_size}: the ranks' random states are not restored"
        )
    return Restored(manifest.step, part.shared, part.own, dict(manifest.meta), tuple(notes))
