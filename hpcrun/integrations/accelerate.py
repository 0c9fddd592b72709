"""Exact resume for training loops with Accelerate: ``state = exact_resume(accelerator)``."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.data_loader import DataLoaderShard
from accelerate.utils import synchronize_rng_states
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hpcrun.checkpoint.state.bucket_order import BucketOrder
from hpcrun.checkpoint.state.generators import capture_generators, restore_generators
from hpcrun.checkpoint.state.hook_state import HookStates
from hpcrun.checkpoint.state.tree import bare
from hpcrun.errors import UserError
from hpcrun.integrations.folder_session import FolderSession
from hpcrun.integrations.wandb import continue_wandb_run
from hpcrun.train.data.exact_loader import ExactLoader, next_pass
from hpcrun.train.own_loop.session import (
    ENDED,
    default_folder,
    refuse_in_a_line,
    require_first,
)
from hpcrun.train.own_loop.unsaved_state import UnsavedState

_REGISTER = "accelerator.register_for_checkpointing"


class ExactState:
    """Position of a training loop with Accelerate; :func:`exact_resume` makes it.

    Attributes:
        steps: number of finished optimizer steps.
        epoch: number of the epoch, from 0.
    """

    def __init__(self, accelerator: Any, folder: Path | str | None, every: int, keep: int) -> None:
        refuse_in_a_line()
        _require_exact(accelerator, every, keep)
        require_first(default_folder(folder))
        self._accelerator, self._every = accelerator, every
        names = [f"loader{number}" for number in range(len(accelerator._dataloaders))]
        self._loaders = {
            name: (loader, exact_shard(loader, name))
            for name, loader in zip(names, accelerator._dataloaders, strict=True)
        }
        models = wrapped(accelerator._models)
        self._buckets = [BucketOrder(model) for model in models]
        self._hooks = [
            HookStates([model], buckets=BucketOrder(model, for_hooks=True)) for model in models
        ]
        for one in self._hooks:
            one.capture()  # refuses a hook with a state that cannot be saved, before training
        self._used: dict[str, int] = {}
        self._session = FolderSession(
            default_folder(folder),
            keep=keep,
            facts={"gradient_accumulation_steps": accelerator.gradient_accumulation_steps},
        )
        self.steps = self.epoch = 0
        given = {
            "accelerator": accelerator,
            "state": self,
            **_numbered("model", accelerator._models),
            **_numbered("optimizer", accelerator._optimizers),
            **_numbered("scheduler", accelerator._schedulers),
            **_numbered("registered", accelerator._custom_objects),
        }
        self._unsaved = UnsavedState(
            given, accelerator._dataloaders, remedy=f"{_REGISTER}({{name}}), with state_dict()"
        )
        self._limit: int | None = None
        self._saved: int | None = None
        self._resumed: dict[str, int] = {}
        self._random: dict[str, Any] = {}
        found = self._session.newest()
        if found is not None:
            self._restore(*found)

    def epochs(self, count: int, *, max_steps: int | None = None) -> Iterator[int]:
        """Yield the numbers of the epochs to train, from the current epoch to ``count - 1``; then save.

        Collective. The code between ``epochs`` and ``batches`` runs again at a resume.

        Args:
            max_steps: number of optimizer steps after which the training ends.

        Raises:
            CheckpointError: the last save failed. Raised on all ranks.
        """
        self._limit = max_steps
        for epoch in range(self.epoch, count):
            if self._is_over():
                break
            if epoch != self.epoch:
                self.epoch, self._used = epoch, {}
            yield epoch
        else:
            self.epoch, self._used = count, {}
        self._save()
        self._session.finish()
        ENDED[self._session.folders.root] = self

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of a prepared loader: a pass, or after a resume the rest of the saved pass.

        Raises:
            UserError: the loader was not prepared before :func:`exact_resume`, or had a pass in this epoch.
        """
        name = next((name for name, (one, _) in self._loaders.items() if one is loader), None)
        if name is None:
            raise UserError(
                "batches(loader): not a loader of accelerator.prepare(); prepare it before exact_resume()"
            )
        resumed = name in self._resumed
        if name in self._used and not resumed:
            raise UserError(
                f"batches(loader): a second pass over {name} in epoch {self.epoch}; a resume could not know "
                "which pass to continue, so make each pass an epoch of state.epochs()"
            )
        self._used[name] = self._resumed.pop(name, 0)
        for batch in loader:
            if self._is_over():
                break
            if resumed:
                restore_generators(self._random)
                resumed = False
            self._used[name] += 1
            yield batch
        if resumed:  # the rest of the pass is empty
            restore_generators(self._random)

    def step(self) -> None:
        """Count the optimizer step, save at the interval, and stop if a rank has a signal. Collective.

        Call it at the end of the loop's body. In a step that only accumulates gradients it does nothing.

        Raises:
            UserError: the loop does not iterate over :meth:`batches`.
            SystemExit: with the code 75, after a stop.
            CheckpointError: the save at a stop failed. Raised on all ranks.
        """
        if not self._used:
            raise UserError("step(): iterate over state.batches(loader), which counts the batches")
        if not self._accelerator.sync_gradients:
            return
        self.steps += 1
        if line := self._unsaved.step(sys._getframe(1), None):
            self._session.say(line)
        reason = self._session.reason(self.steps)
        if reason or self.steps % self._every == 0:
            self._save()
        if reason:
            self._session.leave(self.steps, reason)

    def _is_over(self) -> bool:
        return self._limit is not None and self.steps >= self._limit

    def _save(self) -> None:
        if self._saved == self.steps:
            return
        folder = self._session.folders.prepare(self.steps)
        self._accelerator.save_state(str(folder))
        loaders = {}
        for name, (_, exact) in self._loaders.items():
            used = self._used.get(name)
            loaders[name] = (
                next_pass(exact.state_dict()) if used is None else exact.state_dict(used)
            )
        place = {"epoch": self.epoch, "used": self._used, "loaders": loaders}
        buckets = [one.state_dict() for one in self._buckets]
        hooks = [one.capture() for one in self._hooks]
        own = {**place, "buckets": buckets, "hooks": hooks, "random": capture_generators()}
        self._session.commit(self.steps, own)
        self._saved = self.steps

    def _restore(self, step: int, own: dict[str, Any]) -> None:
        if own["loaders"].keys() != self._loaders.keys():
            raise UserError(
                f"{self._session.folders.path(step)}: of a training with {len(own['loaders'])} loaders, and "
                f"{len(self._loaders)} are prepared; prepare the same loaders before exact_resume()"
            )
        self._accelerator.load_state(str(self._session.folders.path(step)))
        for buckets, state in zip(self._buckets, own["buckets"], strict=True):
            buckets.load_state_dict(state)
        for hooks, state in zip(
            self._hooks, own.get("hooks", [None] * len(self._hooks)), strict=True
        ):
            if note := hooks.restore(state):
                self._session.say(note)
        for name, (_, exact) in self._loaders.items():
            exact.load_state_dict(own["loaders"][name])
        self.steps = self._saved = step
        self.epoch, self._random = own["epoch"], own["random"]
        self._used, self._resumed = dict(own["used"]), dict(own["used"])


class ExactBase(ExactLoader):
    """Exact loader in the place of the DataLoader that Accelerate's loader reads from."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # Accelerate and transformers ask for the class
        return DataLoader


def exact_resume(
    accelerator: Any, folder: Path | str | None = None, *, every: int = 100, keep: int = 3
) -> ExactState:
    """Restore the newest valid checkpoint of a training with Accelerate, and return its position. Collective.

    Call it after ``accelerator.prepare(…)`` and ``register_for_checkpointing(…)``. A checkpoint is what
    ``accelerator.save_state`` writes, with the position in the data, the random generators, and a manifest
    with hashes.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        folder: the folder of the checkpoints; None: the run's folder in a job of hpcrun, or ``checkpoints``.
        every: optimizer steps between saves.
        keep: number of newest checkpoints to keep, at least 2.

    Raises:
        UserError: a loader or a setting makes an exact resume impossible; the text has the remedy.
        CheckpointError: the checkpoints cannot be used; the text has the reason.
    """
    continue_wandb_run()
    return ExactState(accelerator, folder, every, keep)


def wrapped(models: list[nn.Module]) -> list[nn.Module]:
    """Return each model in its DDP wrapper, if it has one.

    Accelerate keeps the models without their wrappers, and a model has no reference to its wrapper.
    """
    found = {}
    for one in gc.get_objects():
        if type(one) is DistributedDataParallel:
            found[id(one.module)] = found[id(bare(one))] = one
    return [found.get(id(model), model) for model in models]


def exact_shard(loader: Any, name: str) -> ExactBase:
    """Make a loader of ``accelerator.prepare`` exact in place, and return the loader that it reads from.

    Raises:
        UserError: the loader cannot be exact; the text has the reason and the remedy.
    """
    if not isinstance(loader, DataLoaderShard):
        raise UserError(
            f"{name}: a {type(loader).__name__} is not a loader of accelerator.prepare() that each rank "
            "reads; prepare it, and set dispatch_batches=False in DataLoaderConfiguration, or in "
            "accelerator_config of TrainingArguments"
        )
    if isinstance(loader.base_dataloader, ExactLoader):
        raise UserError(f"{name}: is exact already; call exact_resume() once")
    if loader.synchronized_generator is not None:
        # Accelerate does so before each pass, because each rank takes its part of one order.
        synchronize_rng_states(["generator"], loader.synchronized_generator)
    loader.base_dataloader = exact = ExactBase(loader.base_dataloader, name=name)
    return exact


def _numbered(name: str, values: list[Any]) -> dict[str, Any]:
    return {f"{name}{number}": value for number, value in enumerate(values)}


def _require_exact(accelerator: Any, every: int, keep: int) -> None:
    if every < 1 or keep < 2:
        raise UserError(
            f"every={every}, keep={keep}: give at least 1 step between saves, and keep at least 2 "
            "checkpoints, so that training can continue from the older one if the newest is damaged"
        )
    if not accelerator._models or not accelerator._dataloaders:
        raise UserError(
            "exact_resume(accelerator): no prepared model and loader; call accelerator.prepare() first"
        )
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise UserError(
            "ProjectConfiguration: automatic_checkpoint_naming chooses other folders than hpcrun; remove it"
        )
