"""The validation loss over all ranks, every sample counted once."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from hpcrun.train.metrics.log import mean_over_ranks
from hpcrun.train.model.no_side_effects import evaluating, kept_buffers, kept_generators
from hpcrun.train.step.to_device import to_device
from hpcrun.train.step.trainer import AMPTrainer
from hpcrun.train.task import Task
from hpcrun.train.task_checks import require_number


@torch.no_grad()
def validate(
    trainer: AMPTrainer,
    task: Task,
    data: Iterable[tuple[Any, int]],
    *,
    group: Any,
) -> float:
    """The mean loss, weighted by the samples that each rank really saw, or as the task says. Collective.

    The bare module is asked, not its DDP wrapper: ranks may have unequal numbers of batches. A sharded one
    needs all ranks in each forward pass: those with fewer batches join in with one that counts nothing. It
    is the model as rank 0 saves it, with averaged weights if they are kept: other ranks' own buffers
    (running statistics) are put aside meanwhile. The random numbers of training go on as if it had not been:
    how often it is done decides no weight.

    Args:
        data: this rank's batches and the samples in each (``ValidationData``).
    """
    total, count = 0.0, 0.0
    module = trainer.module
    with trainer.averaged(), evaluating(module), kept_buffers(module), kept_generators():
        if group is not None:
            for buffer in trainer.module.buffers():
                dist.broadcast(buffer, src=0)
        for batch, samples in data:
            with trainer.autocast():
                loss = task.loss(trainer.module, to_device(batch, trainer.device))
            require_number(loss, type(task).__name__)
            weight = _weight(task, batch, samples)
            if weight:  # without, the loss may be the mean of nothing: not a number
                total += loss.item() * weight
                count += weight
        trainer.after_evaluation()
    return mean_over_ranks(total, count, group)


def _weight(task: Task, batch: Any, samples: int) -> float:
    given = task.weight(batch) if samples else 0.0
    return float(samples if given is None else given)
