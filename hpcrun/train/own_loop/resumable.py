"""Exact resume for a plain PyTorch loop, without a change of its structure: ``hpcrun.resumable``."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from hpcrun.checkpoint.sharded.same_weights import ON_PURPOSE, require_same_weights
from hpcrun.checkpoint.state.bucket_order import BucketOrder
from hpcrun.checkpoint.state.generators import capture_generators, restore_generators
from hpcrun.checkpoint.state.hook_state import HookStates
from hpcrun.checkpoint.state.tree import bare
from hpcrun.errors import UserError
from hpcrun.run.reports import report
from hpcrun.storage.retention import Retention
from hpcrun.train.data.exact_loader import (
    ExactLoader,
    UnknownLoaders,
    next_pass,
    require_own_generators,
)
from hpcrun.train.data.lookahead import END, Lookahead
from hpcrun.train.own_loop.held_data import HeldData
from hpcrun.train.own_loop.own_objects import OwnObject, is_own, on_cpu, on_device
from hpcrun.train.own_loop.rank_data import RankData
from hpcrun.train.own_loop.session import (
    ENDED,
    Session,
    default_folder,
    refuse_in_a_line,
    require_first,
)
from hpcrun.train.own_loop.unsaved_state import UnsavedState, unsaved_weights


def resumable(
    *,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    scaler: Any = None,
    every: int = 100,
    minutes: float | None = None,
    folder: Path | str | None = None,
    retention: Retention | None = None,
    same_samples: bool = False,
    same_weights: bool = True,
    **others: Any,
) -> "Resumable":
    """Resume this training from its newest valid checkpoint, and make it save and stop by itself. Collective.

    Call it in the main thread, as the last line before the loop: random numbers that are drawn between the
    call and the loop differ after a resume. ``model``, ``optimizer``, ``scheduler``, ``loader`` and
    ``scaler`` may each be one object, a list or a dict.

    Args:
        model: plain, in DDP, compiled, or sharded by ``fully_shard``.
        optimizer: created after the model was sharded. An optimizer that is not torch's needs
            ``state_dict()`` and ``load_state_dict()``. None: the loop updates the weights itself, or
            ``others`` has what it optimizes with.
        scheduler: a learning-rate scheduler.
        loader: the ``DataLoader`` of the training; None: the loop makes its batches from the global random
            generators, and counts with ``state.steps``.
        scaler: a ``GradScaler``.
        every: steps between saves.
        minutes: minutes between saves; replaces ``every``.
        folder: the folder of the checkpoints; None: that of the run in a job of hpcrun, else
            ``checkpoints``.
        retention: rule for the checkpoints to keep.
        same_samples: ranks may read the same samples, as the ranks of a tensor-parallel group do. Otherwise
            :meth:`Resumable.step` refuses it.
        same_weights: False if the ranks' weights differ on purpose, as with local SGD: each rank then saves
            its own models and optimizers, and a resume needs the same number of ranks. Otherwise
            :meth:`Resumable.step` refuses weights that differ.
        others: further objects with ``state_dict()`` and ``load_state_dict()``, tensors, dicts and lists,
            such as ``ema=ema``; the same on all ranks. Random generators, and objects of Python classes such
            as an environment or a replay memory, are saved for each rank, with all that their attributes
            hold. A resume fills all of them in place.

    Raises:
        UserError: the training cannot be resumed exactly; the text has the reason and the remedy.
        CheckpointError: as :class:`hpcrun.Checkpointer` and its ``restore()`` (a UserError).
    """
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    parts |= {"loader": loader, "scaler": scaler}
    options = {"every": every, "minutes": minutes, "retention": retention}
    return Resumable(
        parts, others, folder, options, same_samples=same_samples, same_weights=same_weights
    )


class Resumable:
    """State of a resumable training; made by :func:`resumable`.

    Attributes:
        steps: number of finished steps, counted by :meth:`step`.
        epoch: number of finished epochs, counted by :meth:`epochs`.
        kept: the values that the last :meth:`step` was given; None at a new start.
        notes: remarks of the restore: a damaged checkpoint that was skipped.
    """

    def __init__(
        self,
        parts: dict[str, Any],
        others: dict[str, Any],
        folder: Path | str | None,
        options: dict[str, Any],
        *,
        same_samples: bool,
        same_weights: bool,
    ) -> None:
        """Take the arguments of :func:`resumable`: ``options`` are those of the saves."""
        refuse_in_a_line()
        require_first(default_folder(folder))
        named = {kind: _named(kind, one) for kind, one in parts.items()}
        models, optimizers, scalers = named["model"], named["optimizer"], named["scaler"]
        _require_usable(models, optimizers)
        first = next((name for name, one in optimizers.items() if isinstance(one, Optimizer)), "")
        self._schedulers = named["scheduler"]
        self._loaders = {name: ExactLoader(one, name=name) for name, one in named["loader"].items()}
        self._held = HeldData({name: one.dataset for name, one in self._loaders.items()})
        require_own_generators()
        self.steps, self.epoch, self.kept = 0, 0, None
        self._epoch_random: Any = None  # of the generators at the start of the epoch
        self._random: Any = None  # of the generators at the save
        self._resumed = False
        # Of an epoch: its first step, and if it is known.
        self._begin, self._asked_position = 0, True
        self._places: list[Any] = []
        self._begun: set[str] = set()  # the loaders with a pass in this epoch
        self._left: set[str] = set()  # the loaders with a pass that has begun and not ended
        self._ended = False  # a pass has ended after the last step
        self._open = False  # a batch was handed out after the last step
        self._most: int | None = None  # steps
        self._unknown = UnknownLoaders()
        self._passes: dict[str, Lookahead] = {}
        self._late = ""  # what has changed after the last step, and is not in its checkpoint
        known = [*models.values(), *optimizers.values(), *named["scheduler"].values()]
        known += [part for one in models.values() for part in one.modules()]
        own: dict[str, Any] = {"loop": self}
        if not same_weights:
            own |= {f"model.{name}": bare(one) for name, one in models.items()}
            own |= {f"optimizer.{name}": one for name, one in optimizers.items()}
        own |= {name: OwnObject(name, one, known) for name, one in others.items() if is_own(one)}
        extra = {name: one for name, one in others.items() if name not in own}
        extra |= {name: one for name, one in optimizers.items() if name != first}
        for several in (self._schedulers, scalers):
            extra |= {name: several[name] for name in list(several)[1:]}
        extra |= {f"buckets.{name}": BucketOrder(one) for name, one in models.items()}
        whole = {name.replace(".", "_"): bare(one) for name, one in models.items()}
        if len(models) > 1:  # The module of all models has none of their wrappers.
            own |= {
                f"hooks.{name}": HookStates([one], buckets=BucketOrder(one, for_hooks=True))
                for name, one in models.items()
            }
        self._model = next(iter(models.values())) if len(models) == 1 else nn.ModuleDict(whole)
        self._session = Session(
            folder,
            model=self._model,
            # A checkpoint has an optimizer of torch.
            optimizer=optimizers.get(first)
            or SGD(next(iter(models.values())).parameters(), lr=0.0),
            scheduler=next(iter(self._schedulers.values()), None),
            scaler=next(iter(scalers.values()), None),
            extra=extra,
            own=own,
            same_weights=same_weights,
            **options,
        )
        self._same_weights = same_weights
        self._data = RankData(self._session.ranks, self._loaders, same_samples=same_samples)
        saved = {"state": self} | models | optimizers | self._schedulers | scalers | others
        self._unsaved = UnsavedState(saved, named["loader"].values())
        if not optimizers and not any(hasattr(one, "step") for one in others.values()):
            self._session.say(_BY_HAND)
        if line := unsaved_weights(optimizers, models | self._schedulers | scalers | others):
            self._session.say(line)
        self.steps = self._first = self._session.restore()
        self.notes = self._session.checkpointer.notes
        if self._held.line:
            self._session.say(self._held.line)
        if self.steps:
            self._resumed, self._random = True, capture_generators()
        for one in optimizers.values():
            if isinstance(one, Optimizer):
                one.register_step_post_hook(self._note_late)

    def step(self, keep: Any = None) -> None:
        """Count a finished step; save at the interval, and stop after a signal on any rank. Collective.

        Call it once per step, as the last line of the loop: after the optimizer and the scheduler.

        Args:
            keep: tensors and plain data of this rank that the next step needs, such as a batch that was
                fetched ahead. They are in :attr:`kept` after a resume.

        Raises:
            SystemExit: code 75, after a signal to stop; the state is saved.
            CheckpointError: as :meth:`hpcrun.Checkpointer.save`; in the first steps of a start and of an
                epoch also if the state cannot be saved.
            UserError: no batch came from :meth:`batches` since the last step; in the first two steps of
                a start a ``DataLoader`` that :func:`resumable` was not given has given batches; in the
                first two steps of a pass also if ranks read the same samples or unequal numbers of batches;
                in the first two steps of a start also if the ranks have different weights, without
                ``same_weights=False``.
        """
        if self._loaders and not self._open:
            raise UserError(
                f"state.step(): step {self.steps + 1} has no batch; iterate state.batches(loader) "
                "in place of the loader, and call state.step() once, after all that belongs to its batches"
            )
        if not self._asked_position and not self._loaders:
            raise UserError(
                f"state.step(): the resume continues after {self.steps - self._begin} steps of epoch "
                f"{self.epoch}, and the loop has not asked for this place; begin the steps of an epoch at "
                "state.position(): for i in range(state.position(), …)"
            )
        self._unknown.step()
        self._open, self._ended, self._late = False, False, ""
        self._places = self._scheduled()
        self.steps += 1
        self.kept = keep
        left = None if self._most is None else self._most - self.steps + 1
        used = self._used()
        if self._data.due:
            # Before the step is reported: a job that is refused in its first step does not start again.
            self._data.step(used, left)
        if self._same_weights and self.steps - self._first <= 2:
            require_same_weights(
                self._model, self._session.ranks, steps=self.steps, on_purpose=ON_PURPOSE
            )
        if line := self._unsaved.step(sys._getframe(1), keep):
            self._session.say(line)
        notes = self._looked_ahead(used)
        if reason := self._session.step(self.steps, notes):
            self._session.leave(self.steps, reason)
        if self._data.has_begun(self._session.notes()):
            self._data.step(used, left)

    def _used(self) -> dict[str, int]:
        """Return the numbers of batches of the passes in progress."""
        used = {name: self.position(one.loader) for name, one in self._loaders.items()}
        return {name: count for name, count in used.items() if name in self._left}

    def _looked_ahead(self, used: dict[str, int]) -> list[int]:
        """Return the notes of this rank for the other ranks; none on a single rank."""
        if not self._data.active:
            return []
        for name in used:
            if self._data.uncounted(name) and not self._is_over():
                # A batch ahead, so that no rank begins a step that another rank does not make.
                self._data.note_ahead(name, self._passes[name].has_more())
        return self._data.notes(used, over=self._is_over())

    def epochs(self, count: int, *, max_steps: int | None = None) -> Iterator[int]:
        """Yield the numbers of the epochs that are left, up to ``count``; then :meth:`finish`.

        After a resume it begins with the epoch of the checkpoint; :meth:`batches` skips finished batches.

        Without a loader, count the steps of an epoch from :meth:`position`.

        Args:
            count: number of epochs of the training.
            max_steps: number of steps after which the training ends, also in the middle of an epoch.

        Raises:
            UserError: ``max_steps`` without a loader: the loop itself ends the epoch.
        """
        if max_steps is not None and not self._loaders:
            raise UserError(
                f"state.epochs(max_steps={max_steps}): hpcrun.resumable() has no loader=, so the loop itself "
                "must end after so many steps; use fewer epochs, or while state.steps < …"
            )
        self._most = max_steps
        while self.epoch < count and not self._is_over():
            if self._resumed and self._epoch_random is not None:
                restore_generators(self._epoch_random)
            else:
                self._epoch_random = capture_generators()
                self._begun, self._begin = set(), self.steps
            self._asked_position, self._resumed = not self._resumed, False
            # The code after the epoch before may have changed what the checkpoint holds.
            self._session.unchecked = max(1, self._session.unchecked)
            yield self.epoch
            self._require_batches()
            if not self._is_over():
                self.epoch, self._epoch_random = self.epoch + 1, None
        self.finish()

    def batches(self, loader: Any = None, *, limit: int | None = None) -> Iterator[Any]:
        """Return the batches of the next pass over ``loader``; after a resume, the rest of the saved pass.

        Args:
            loader: a loader that :func:`resumable` was given; None: the only loader.
            limit: the most batches of a pass, in place of a ``break`` or ``islice``: a resume could not know
                that the loop had left the pass.

        Raises:
            UserError: the loader is unknown, it had a pass in this epoch, the loop has left its pass before
                the last batch, or the samples differ from those before the interruption.
        """
        name, exact = self._exact(loader)
        resumed = exact.resumed
        if limit is not None and limit < 1:
            raise UserError(f"state.batches(limit={limit}): give at least 1 batch, or None for all")
        if not resumed and name in self._begun:
            raise UserError(
                f"state.batches(): a second pass over {name} in epoch {self.epoch}; a resume could not know "
                "which pass to continue, so make each pass an epoch: for epoch in state.epochs(…), which "
                "also takes max_steps="
            )
        if not resumed and name in self._left:
            raise UserError(
                f"state.batches(): the loop has left the pass over {name} before its end, after "
                f"{self.position(loader)} batches, where a resume would continue; in place of break or "
                f"islice use state.batches(loader, limit={self.position(loader)}), or "
                "state.epochs(…, max_steps=…)"
            )
        self._begun.add(name)
        rest = iter(exact)
        if resumed:
            # What ran since the restore, such as a validation, may have drawn random numbers.
            restore_generators(self._random)
        self._data.begin(name, limit)
        self._passes[name] = ahead = Lookahead(rest)
        return self._counted(name, exact, ahead, limit)

    def position(self, loader: Any = None) -> int:
        """Return the number of batches of the current pass over ``loader`` that were handed out.

        Use it for the numbers of the batches: ``enumerate(state.batches(loader), state.position(loader))``.
        A training without a loader gets the number of steps of this epoch: ``for i in
        range(state.position(), 100)``. After a resume, call it directly before the first step.
        """
        if loader is None and not self._loaders:
            if not self._asked_position:
                # What ran since the start of the epoch, such as a shuffle, may have drawn random numbers.
                restore_generators(self._random)
                self._asked_position = True
            return self.steps - self._begin
        name, exact = self._exact(loader)
        return exact.batches - self._ahead(name)

    def _ahead(self, name: str) -> int:
        return len(self._passes[name].ahead) if name in self._passes else 0

    def finish(self) -> None:
        """Save the last step, and :meth:`close`; :meth:`epochs` calls it. Collective.

        Raises:
            CheckpointError: the save failed. Raised on all ranks.
        """
        self._session.save(self.steps)
        self.close()

    def close(self) -> None:
        """Wait for the pending save, and report to hpcrun that the work is done. Collective.

        Call it before ``torch.distributed.destroy_process_group()``.

        Raises:
            CheckpointError: the last save failed. Raised on all ranks.
        """
        self._session.close()
        ENDED[self._session.folder.absolute()] = self
        report(self.steps, done=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loop on this rank; for the checkpoint."""
        return {
            "epoch": self.epoch,
            "epoch_random": self._epoch_random,
            "epoch_begin": self._begin,
            "kept": on_cpu(self.kept),
            "held": self._held.marks,
            "loaders": {name: self._pass(name, one) for name, one in self._loaders.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        Raises:
            UserError: the checkpoint has other loaders.
        """
        if state["loaders"].keys() != self._loaders.keys():
            raise UserError(
                f"the checkpoint has the loaders {sorted(state['loaders'])}, and this training has "
                f"{sorted(self._loaders)}; pass the same loaders with the same names"
            )
        self.epoch, self._epoch_random = state["epoch"], state["epoch_random"]
        self._begin = state.get("epoch_begin", 0)  # a checkpoint of an older version has none
        self.kept = on_device(state["kept"])
        self._held.compare(state.get("held", {}))
        for name, one in self._loaders.items():
            one.load_state_dict(state["loaders"][name])
        self._begun = {name for name, one in self._loaders.items() if one.resumed}

    def _pass(self, name: str, loader: ExactLoader) -> dict[str, Any]:
        """Return the position of a loader; its next pass if it had none in this epoch."""
        place = loader.state_dict(loader.batches - self._ahead(name))
        in_epochs = self.epoch or self._epoch_random is not None
        ended = self._epoch_random is None or name not in self._begun
        return next_pass(place) if in_epochs and ended else place

    def _exact(self, loader: Any) -> tuple[str, ExactLoader]:
        for name, one in self._loaders.items():
            if loader is one.loader or (loader is None and len(self._loaders) == 1):
                return name, one
        raise UserError(
            "state.batches(): give it a loader that hpcrun.resumable(loader=…) was given; it has "
            f"{len(self._loaders)}"
        )

    def _counted(
        self, name: str, exact: ExactLoader, rest: "Lookahead", limit: int | None
    ) -> Iterator[Any]:
        self._left.add(name)
        first = True
        try:
            while not self._is_over():
                if limit is not None and exact.batches - self._ahead(name) >= limit:
                    break
                if rest.looked and not self._open:
                    self._data.require_even(self._session.notes(wait=True), name)
                batch = next(rest, END)
                if batch is END:
                    break
                if not first and not self._open:
                    self._require_last()
                first, self._open = False, True
                yield batch
            self._ended = True
        finally:
            if self._ended:  # this pass, or another pass in the same zip()
                self._left.discard(name)

    def _require_batches(self) -> None:
        """Raise UserError in the first epoch of a start if this rank had no batch, and is one of several."""
        ranks = self._session.ranks
        empty = [name for name in self._begun if not self._loaders[name].batches]
        if ranks.world_size > 1 and self.steps == self._first and empty:
            raise UserError(
                f"{empty[0]}: rank {ranks.rank} has no batch, so the other ranks would wait for it; give "
                f"the {ranks.world_size} ranks at least as many samples: sampler=DistributedSampler(dataset) "
                "pads the data; or start fewer ranks"
            )

    def _is_over(self) -> bool:
        return self._most is not None and self.steps >= self._most

    def _require_last(self) -> None:
        """Raise UserError if something has changed after the last step, in the middle of a pass."""
        late = self._late or ("scheduler" if self._scheduled() != self._places else "")
        if late:
            raise UserError(
                f"state.step(): {late}.step() was called after it, so the checkpoint of step {self.steps} "
                "lacks this change; call state.step() as the last line of the loop"
            )

    def _note_late(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._open:
            self._late = type(optimizer).__name__

    def _scheduled(self) -> list[Any]:
        return [getattr(one, "last_epoch", None) for one in self._schedulers.values()]


def _named(kind: str, value: Any) -> dict[str, Any]:
    """Return the objects of an argument by name: ``model``, ``model.0`` or ``model.key``."""
    if isinstance(value, Mapping):
        return {f"{kind}.{key}": one for key, one in value.items()}
    if isinstance(value, list | tuple):
        return {f"{kind}.{number}": one for number, one in enumerate(value)}
    return {} if value is None else {kind: value}


def _require_usable(models: dict[str, Any], optimizers: dict[str, Any]) -> None:
    if not models:
        raise UserError("model: is missing; pass model=, one Module or several")
    for name, one in models.items():
        if not isinstance(one, nn.Module):
            raise UserError(
                f"{name}: is a {type(one).__name__}, not a Module; pass it by another name"
            )
        if hasattr(one, "_forward_module"):
            raise UserError(
                f"{name}: is a {type(one).__name__} of Lightning Fabric, and its state_dict() has other "
                "names than its weights; pass model=model._forward_module and optimizer=optimizer.optimizer"
            )
    for name, one in optimizers.items():
        if not all(callable(getattr(one, way, None)) for way in ("state_dict", "load_state_dict")):
            raise UserError(
                f"{name}: a {type(one).__name__} has no state_dict() and load_state_dict(), so a checkpoint "
                "would miss its state; define both, or pass the optimizer that it wraps"
            )


_BY_HAND = (
    "hpcrun.resumable() has no optimizer=, so the loop must update the weights itself; a value that the "
    "update carries from step to step, such as a momentum or a learning rate, belongs in a dict that you pass"
)
