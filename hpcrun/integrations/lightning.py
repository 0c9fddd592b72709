"""Exact resume for Lightning: ``Trainer(callbacks=[ExactResume()])``.

Lightning's loops begin as in a new training, with all their hooks. Before the first batch, the saved state
replaces theirs. Lightning's own restart is not used: it repeats parts of a step, such as scheduler steps.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.fsdp import FSDPModule

from hpcrun.checkpoint.state.bucket_order import BucketOrder
from hpcrun.checkpoint.state.generators import capture_generators, restore_generators
from hpcrun.errors import UserError
from hpcrun.integrations.lightning_state import RankState, TrainerState
from hpcrun.ranks.signals import STOP
from hpcrun.storage.retention import Retention
from hpcrun.train.data.exact_loader import ExactLoader
from hpcrun.train.own_loop.session import (
    ENDED,
    Session,
    default_folder,
    refuse_in_a_line,
    require_first,
)

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
_CALLBACKS = {
    "StochasticWeightAveraging": "use EMAWeightAveraging or WeightAveraging",
    "BaseFinetuning": "freeze layers in configure_model(), and give each optimizer group its learning rate",
    "LearningRateFinder": "find the learning rate with another Trainer",
    "BatchSizeFinder": "find the batch size with another Trainer",
    "OnExceptionCheckpoint": "remove it: ExactResume saves at a stop",
}


class ExactResume(Callback):  # type: ignore[misc]
    """Callback that saves a training, stops it on all ranks together, and resumes it with the same bits.

    A signal to stop ends the program with exit code 75 after a save. The same program, started again,
    continues by itself; ``ckpt_path`` counts only for its first start. After its end it does not train again.

    Args:
        folder: the folder of the checkpoints; None: that of the run, or ``checkpoints`` outside of hpcrun.
        every: optimizer steps between saves; batches with manual optimization.
        minutes: minutes between saves; replaces ``every``.
        retention: rule for the checkpoints to keep.

    Raises:
        UserError: at ``fit``: a setting or a data loader cannot be exact; the text has the remedy.
        CheckpointError: at ``fit``: as :class:`hpcrun.Checkpointer`.
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        every: int = 100,
        minutes: float | None = None,
        retention: Retention | None = None,
    ) -> None:
        self._folder = folder
        self._options: dict[str, Any] = {"every": every, "minutes": minutes, "retention": retention}
        STOP.install()
        refuse_in_a_line()
        if "HPCRUN_RUN" in os.environ:
            _hide_slurm()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the Trainer, and connect to its loops; called by Lightning."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        for problem in _problems(trainer):
            raise UserError(f"ExactResume: {problem}")
        folder = default_folder(self._folder).absolute()
        require_first(folder, trainer)
        # Lightning's handler of SIGTERM starts a collective, and that of SIGUSR1 requeues the job.
        trainer._signal_connector.register_signal_handlers = _nothing
        STOP.install()
        if "HPCRUN_RUN" not in os.environ:
            _keep_requeue(trainer)
        training = Training(trainer, folder, self._options)
        trainer.strategy.process_dataloader = training.exact_loader
        trainer.fit_loop.run = training.run
        trainer.fit_loop.on_run_end = training.end
        trainer.fit_loop._load_combined_loader_states = _nothing
        trainer.fit_loop.epoch_loop.advance = training.advance


class Training:
    """One call of ``fit``: the parts of Lightning's loops that :class:`ExactResume` extends."""

    def __init__(self, trainer: Any, folder: Path, options: dict[str, Any]) -> None:
        self._trainer, self._folder, self._options = trainer, folder, options
        self._loaders: list[ExactLoader] = []
        self._shared, self._own = TrainerState(trainer), RankState(trainer, self._loaders)
        self._random: dict[str, Any] | None = None
        self._session: Session | None = None
        self._versions: list[int] = []

    def exact_loader(self, loader: Any) -> Any:
        """Return the loader to iterate in place of ``loader``, which has its final sampler."""
        trainer, strategy = self._trainer, self._trainer.strategy
        loader = type(strategy).process_dataloader(strategy, loader)
        rank = (trainer.distributed_sampler_kwargs or {}).get("rank", 0)
        if trainer.training:
            name = f"train_dataloader {len(self._loaders)}" if self._loaders else "train_dataloader"
            loader = ExactLoader(loader, name=name, rank=rank)
            self._loaders.append(loader)
        elif trainer.state.fn == "fit" and getattr(loader, "persistent_workers", False):
            # Random values of a worker would depend on all validations since its start.
            loader = _Validation(loader, trainer, rank)
        return loader

    def run(self) -> None:
        """Run Lightning's fit loop, from the saved state on."""
        loop = self._trainer.fit_loop
        loop.setup_data()
        if self._loaders:
            _require_fetcher(loop)
            self._begin()
        type(loop).run(loop)

    def _begin(self) -> None:
        """Load the newest checkpoint. Hooks before the first batch see the random state of a new start."""
        trainer = self._trainer
        first, *others = trainer.optimizers
        _reshard(trainer.lightning_module)
        buckets = BucketOrder(trainer.strategy.model)
        session = self._session = Session(
            self._folder,
            model=trainer.strategy.model,
            optimizer=first,
            extra={"lightning": self._shared, "optimizers": others, "buckets": buckets},
            own={"lightning": self._own},
            **self._options,
        )
        before = capture_generators()
        session.restore()
        if self._shared.saved is None:
            restore_generators(before)
            return
        self._random = capture_generators()
        restore_generators(before)
        self._versions = self._weights()
        if self._shared.finished and trainer.fit_loop.skip:
            self._finish(session)

    def advance(self, fetcher: Any) -> None:
        """Train on the next batch of Lightning's epoch loop, unless a save or a stop is due."""
        trainer, session = self._trainer, self._session
        loop = trainer.fit_loop.epoch_loop
        assert session is not None
        _reshard(trainer.lightning_module)
        if self._random is not None:
            self._enter(fetcher)
        self._shared.active = self._own.active = True
        if not loop._should_accumulate():  # gradients are not in the checkpoint
            steps = self._steps()
            if reason := session.step(steps):
                session.leave(steps, reason)
        type(loop).advance(loop, fetcher)

    def _enter(self, fetcher: Any) -> None:
        """Replace the state that a new start has at its first batch by the saved state."""
        assert self._session is not None
        changed = self._weights() != self._versions
        if any(self._session.ranks.gather(changed)):
            # A hook such as on_train_start has changed weights, as it did in the first start.
            self._session.checkpointer.restore()
        self._shared.enter()
        self._own.enter(fetcher, finished=self._shared.finished)
        assert self._random is not None
        restore_generators(self._random)
        self._random = None
        self._shared.finished = False

    def end(self) -> None:
        """Run Lightning's hooks after the last step, and save the end of the training."""
        loop = self._trainer.fit_loop
        type(loop).on_run_end(loop)
        _reshard(self._trainer.lightning_module)
        assert self._session is not None
        self._shared.finished = self._shared.active = self._own.active = True
        self._finish(self._session)

    def _finish(self, session: Session) -> None:
        session.finish(self._steps())
        ENDED[self._folder] = self._trainer

    def _steps(self) -> int:
        """Return the optimizer steps so far; batches with manual optimization, which may step at will."""
        trainer = self._trainer
        if trainer.lightning_module.automatic_optimization:
            return int(trainer.global_step)
        return int(trainer.fit_loop.epoch_loop.batch_progress.total.completed)

    def _weights(self) -> list[int]:
        """Return the counters of changes that torch keeps for each weight and buffer."""
        model = self._trainer.lightning_module
        return [tensor._version for tensor in (*model.parameters(), *model.buffers())]


class _Validation(ExactLoader):
    """Loader of a validation: a whole pass each time, with the number of the training's epoch."""

    def __init__(self, loader: Any, trainer: Any, rank: int) -> None:
        self._trainer = trainer
        super().__init__(loader, name="val_dataloader", rank=rank)

    def __iter__(self) -> Any:
        """Begin the pass of this epoch."""
        place = {"epoch": self._trainer.current_epoch, "begun": True}
        self.load_state_dict(self.state_dict(0) | place)
        return super().__iter__()


def _require_fetcher(loop: Any) -> None:
    """Raise UserError if ``training_step`` takes the iterator, or there is nothing to optimize."""
    if "DataLoaderIter" in type(loop._data_fetcher).__name__:
        raise UserError(
            "ExactResume: training_step(dataloader_iter) fetches batches by itself, so their number is "
            "unknown; define training_step(batch, batch_idx)"
        )
    if not any(group["params"] for one in loop.trainer.optimizers for group in one.param_groups):
        raise UserError("ExactResume: configure_optimizers() returns no optimizer; return one")


def _problems(trainer: Any) -> Iterator[str]:
    """Yield the settings of the Trainer that cannot be exact, with the remedy."""
    started = os.environ.get("WORLD_SIZE", "1")
    if started != str(trainer.world_size) and "HPCRUN_RUN" in os.environ:
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        yield (
            f"Trainer trains on {trainer.world_size} rank(s), and hpcrun has started {started}; pass "
            f'Trainer(devices={int(started) // nodes}, num_nodes={nodes}, strategy="ddp")'
        )
    strategy = trainer.strategy
    if type(strategy).__name__ not in _STRATEGIES:
        yield f"{type(strategy).__name__} is not supported; use one of {', '.join(_STRATEGIES)}"
    if getattr(strategy, "_tensor_parallel_size", 1) not in (1, "auto"):
        yield "tensor parallelism is not supported; pass ModelParallelStrategy(tensor_parallel_size=1)"
    if "MultiProcessing" in type(strategy.launcher).__name__:
        yield 'Trainer starts its ranks by itself; pass strategy="ddp", and start with hpcrun or torchrun'
    if trainer.reload_dataloaders_every_n_epochs:
        yield (
            "reload_dataloaders_every_n_epochs makes loaders that depend on earlier epochs; set it to 0, and "
            "give the dataset a method set_epoch(epoch)"
        )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        yield "val_check_interval is a time, which no resume repeats; give a number of batches"
    names = [{base.__name__ for base in type(one).__mro__} for one in trainer.callbacks]
    for name, remedy in _CALLBACKS.items():
        if any(name in one for one in names):
            yield f"{name} cannot be resumed exactly; {remedy}"
    if sum("ExactResume" in one for one in names) > 1:
        yield "the Trainer has two ExactResume callbacks; keep one"


def _reshard(model: Any) -> None:
    """Shard the weights that a validation of FSDP2 has left gathered."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _hide_slurm() -> None:
    """Keep Lightning from detecting Slurm: ranks come from the variables of hpcrun, which also requeues."""
    for package in ("lightning.fabric", "lightning_fabric"):
        module = sys.modules.get(f"{package}.plugins.environments.slurm")
        if module is not None:
            module.SLURMEnvironment.detect = staticmethod(lambda: False)


def _keep_requeue(trainer: Any) -> None:
    """Let Lightning requeue a job that hpcrun did not submit, after hpcrun's save instead of Lightning's."""
    environment = trainer._accelerator_connector.cluster_environment
    signal_of_slurm = getattr(environment, "requeue_signal", None)
    if not getattr(environment, "auto_requeue", False) or signal_of_slurm is None:
        return

    def requeue(number: int, frame: FrameType | None) -> None:
        trainer.save_checkpoint = _nothing
        trainer._signal_connector._slurm_sigusr_handler_fn(number, frame)

    STOP.keep(signal_of_slurm, requeue)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a method of Lightning."""


__all__ = ["ExactResume"]
