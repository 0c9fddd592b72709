"""Make the batches for training and for validation."""

import os
from dataclasses import dataclass

from hpcrun.devices import accelerator
from hpcrun.train.data.batches import Steps, training_steps
from hpcrun.train.data.batching import accumulation_of
from hpcrun.train.data.workers import worker_processes
from hpcrun.train.evaluation.validate import validate
from hpcrun.train.evaluation.validation_data import ValidationData
from hpcrun.train.setup.context import Context
from hpcrun.train.setup.model import Resumed
from hpcrun.train.setup.task import OpenedTask
from hpcrun.train.step.trainer import DistributedAMPTrainer


def build_batches(context: Context, opened: OpenedTask, resumed: Resumed, steps: range) -> Steps:
    """Make this rank's micro-batches for ``steps``. Collective.

    Raises:
        UserError: the data cannot be divided into batches, or cannot resume.
    """
    config, distributed = context.config, context.distributed
    return context.together(
        lambda: training_steps(
            opened.dataset,
            steps,
            rank=distributed.rank,
            world_size=distributed.world_size,
            batch_size=config.train.batch_size,
            accumulation=accumulation_of(config.train, distributed.world_size),
            seed=config.seed,
            workers=worker_processes(config, os.environ),
            pin_memory=accelerator.is_accelerator(resumed.trainer.device),
            saved=resumed.stream_state(),
            uneven=config.train.uneven,
            prefetch=config.data.prefetch,
            collate=opened.collate,
        )
    )


@dataclass(frozen=True)
class Validation:
    """Validation of a training; ``data`` is None if the task has no validation dataset."""

    context: Context
    opened: OpenedTask
    trainer: DistributedAMPTrainer
    data: ValidationData | None

    def loss(self) -> float | None:
        """Return the validation loss over all ranks; None without data. Collective."""
        if self.data is None:
            return None
        return validate(self.trainer, self.opened.task, self.data, ranks=self.context.ranks)

    def close(self) -> None:
        """End the loader processes."""
        if self.data is not None:
            self.data.close()


def build_validation(
    context: Context, opened: OpenedTask, trainer: DistributedAMPTrainer
) -> Validation:
    """Choose the validation samples of this rank; reads nothing yet."""
    config, distributed = context.config, context.distributed
    if opened.validation_set is None:
        return Validation(context, opened, trainer, None)
    data = ValidationData(
        opened.validation_set,
        context.ranks,
        batch_size=config.train.batch_size,
        accumulation=accumulation_of(config.train, distributed.world_size),
        limit=config.train.validate_batches,
        same_count=trainer.forward_is_collective,
        workers=worker_processes(config, os.environ),
        prefetch=config.data.prefetch,
        pin_memory=accelerator.is_accelerator(trainer.device),
        collate=opened.collate,
    )
    return Validation(context, opened, trainer, data)
