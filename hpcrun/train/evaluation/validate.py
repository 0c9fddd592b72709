"""Compute the validation loss over all ranks; every sample counts once."""

from collections.abc import Iterable
from typing import Any

import torch

from hpcrun.ranks.collective import Ranks
from hpcrun.train.metrics.log import mean_over_ranks
from hpcrun.train.model.no_side_effects import evaluating, kept_buffers, kept_generators
from hpcrun.train.parallel.from_rank_zero import copy_from_rank_zero
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
    ranks: Ranks,
) -> float:
    """Return the mean loss over all ranks, weighted by samples or by the task's weights. Collective.

    Forward passes go through the bare module instead of DDP, because ranks may have different numbers of
    batches. An FSDP model needs all ranks in each forward pass: ranks with fewer batches add batches of
    weight 0. The model is evaluated as rank 0 saves it, with averaged weights if there are any; the ranks'
    own buffers (running statistics) and the random generators are restored afterwards, so validation does
    not affect training.

    Args:
        data: this rank's batches and the number of samples in each (``ValidationData``).
        ranks: all ranks, with a control group.
    """
    total, count = 0.0, 0.0
    module = trainer.module
    with trainer.averaged(), evaluating(module), kept_buffers(module), kept_generators():
        if ranks.world_size > 1:
            for buffer in trainer.module.buffers():
                copy_from_rank_zero(buffer)
        for batch, samples in data:
            with trainer.autocast():
                loss = task.loss(trainer.module, to_device(batch, trainer.device))
            require_number(loss, type(task).__name__)
            weight = _weight(task, batch, samples)
            if weight:  # With weight 0 the loss may be NaN, the mean of no samples.
                total += loss.item() * weight
                count += weight
        trainer.after_evaluation()
    return mean_over_ranks(total, count, ranks)


def _weight(task: Task, batch: Any, samples: int) -> float:
    given = task.weight(batch) if samples else 0.0
    return float(samples if given is None else given)
