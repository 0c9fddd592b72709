"""The validation loss over all ranks, every sample counted once."""

from typing import Any

import torch
from torch.utils.data import Dataset

from hpcrun.train.data import validation_batches
from hpcrun.train.metrics import mean_over_ranks
from hpcrun.train.task import Task
from hpcrun.train.trainer import AMPTrainer, to_device


@torch.no_grad()
def validate(
    trainer: AMPTrainer,
    task: Task,
    dataset: Dataset[Any],
    *,
    rank: int,
    world_size: int,
    batch_size: int,
    limit: int | None,
    group: Any,
) -> float:
    """The mean loss per sample, weighted by the samples that each rank really saw. Collective.

    The bare module is asked, not its DDP wrapper: ranks may have unequal numbers of batches.
    """
    trainer.module.eval()
    total, count = 0.0, 0
    for batch, samples in validation_batches(
        dataset, rank=rank, world_size=world_size, batch_size=batch_size, limit=limit
    ):
        with trainer.autocast():
            loss = task.loss(trainer.module, to_device(batch, trainer.device))
        total += loss.item() * samples
        count += samples
    trainer.module.train()
    return mean_over_ranks(total, count, group)
