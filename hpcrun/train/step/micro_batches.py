"""Run one optimizer step: weight its micro-batches by their samples or tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpcrun.train.data.batching import Batching
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.model.checks import Frozen, require_loss
from hpcrun.train.step.trainer import DistributedAMPTrainer, LossFunction, StepResult
from hpcrun.train.step.weighting import Weight, impossible
from hpcrun.train.task import Task


class MicroBatchStep:
    """Takes steps with equal weight for every sample, or for every token if the task counts tokens.

    If all micro-batches have the same number of samples and the task sets no weights, there is no overhead
    and no extra communication.
    """

    def __init__(
        self,
        trainer: DistributedAMPTrainer,
        task: Task,
        batching: Batching,
        loss: LossFunction | None = None,
    ) -> None:
        """``loss``: the task's loss, possibly wrapped for measurements; by default ``task.loss`` itself."""
        self._trainer, self._task, self._bare = trainer, task, loss or task.loss
        self._loss: LossFunction = self._first_loss
        self._name = type(task).__name__
        self._frozen = Frozen(trainer)
        self._batching, self._rank = batching, trainer.distributed.rank
        self._asks = type(task).weight is not Task.weight
        self._plain = batching.always_even and not self._asks

    def __call__(self, step: int, micro_batches: Sequence[Any]) -> StepResult:
        """Take step number ``step`` with this rank's micro-batches. Collective."""
        taken = MicroBatches(micro_batches)
        plain = self._plain
        result = self._trainer.training_step(taken, self._loss) if plain else self._weighted(taken)
        self._loss = self._bare
        if self._frozen:
            self._frozen.require(step)
        self._task._reached(step + 1)
        return result

    def _weighted(self, micro_batches: MicroBatches) -> StepResult:
        trainer, loss, batching = self._trainer, self._loss, self._batching
        counts = None if batching.always_even else batching.counts(self._rank)
        weights, total = self._weights(micro_batches, counts), None
        if weights is None and counts is not None:
            weights, total = counts, batching.batch_size
        if weights is None:
            return trainer.training_step(micro_batches, loss)
        return trainer.training_step(micro_batches, loss, weights, total)

    def _first_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the loss in this process's first step, and check it on all ranks together."""
        value = self._bare(model, batch)
        if self._trainer.forward_is_collective:
            # A rank that skipped an FSDP block would wait here while the other ranks wait for that block.
            require_loss(value, self._name)
        else:
            self._trainer.control_ranks().together(lambda: require_loss(value, self._name))
        return value

    def _weights(
        self, micro_batches: Sequence[Any], counts: Sequence[int] | None
    ) -> Sequence[Weight] | None:
        """Return the task's weights, and zero for padding; None if the task sets no weights."""
        if not self._asks:
            return None
        found = [self._task.weight(batch) for batch in micro_batches]
        known = [weight for weight in found if weight is not None]
        if not known:
            return None
        if len(known) < len(found):
            name = type(self._task).__name__
            raise TypeError(f"{name}.weight() gave None for one batch and a number for another")
        if counts is None:
            # Invalid weights become tensors: all ranks find them with the gradients and name this rank.
            return [
                weight if isinstance(weight, Tensor) or not impossible(weight) else _tensor(weight)
                for weight in known
            ]
        # Tensors even for numbers: the number 0 marks a rank without samples.
        return [
            _tensor(weight) if count else 0.0 for weight, count in zip(known, counts, strict=True)
        ]


def _tensor(weight: Weight) -> Tensor:
    return torch.as_tensor(weight, dtype=torch.float64)
