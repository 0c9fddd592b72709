"""Make the batches for training and for validation."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hpcrun.devices import accelerator
from hpcrun.ranks.collective import Ranks
from hpcrun.train.data import batching as order
from hpcrun.train.data.batches import MicroBatchDataset, Steps, length, training_steps
from hpcrun.train.data.batching import accumulation_of, start_worker, worker_processes
from hpcrun.train.metrics.log import mean_over_ranks
from hpcrun.train.model.unused_parameters import evaluating, kept_buffers, kept_generators
from hpcrun.train.parallel.strategies import copy_from_rank_zero
from hpcrun.train.setup.model import Resumed
from hpcrun.train.setup.task import Context, OpenedTask
from hpcrun.train.step.precision import to_device
from hpcrun.train.step.trainer import AMPTrainer, DistributedAMPTrainer
from hpcrun.train.task import Task
from hpcrun.train.task_checks import require_number


class ValidationData:
    """This rank's batches with their numbers of samples; iterate once per validation.

    The loader processes start with the first validation and wait for the next validation.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        ranks: Ranks,
        *,
        batch_size: int,
        accumulation: int,
        limit: int | None,
        same_count: bool = False,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        """Choose the samples; reads nothing yet.

        Args:
            batch_size: as in training; a validation batch is at most as large as training's micro-batches.
            limit: use only as many samples as this number of global batches holds. They are the same each
                time and spread over the dataset, which may be sorted. None: all samples.
            same_count: give all ranks the same number of batches; additional batches hold one sample of
                weight 0.
            workers: maximum number of loader processes; 0 reads in this process.
            prefetch: batches that each loader process reads ahead.
            collate: makes a batch from its samples.
        """
        size = length(dataset)
        chosen: Any = range(size)
        if limit is not None and limit * batch_size < size:
            positions = np.arange(limit * batch_size, dtype=np.int64)
            chosen = sorted(order.samples(positions, size, seed=0).tolist())
        mine = list(chosen[ranks.rank :: ranks.world_size])
        share = max(1, batch_size // (ranks.world_size * accumulation))
        chunks = [mine[start : start + share] for start in range(0, len(mine), share)]
        self._counts = [len(chunk) for chunk in chunks]
        if same_count:
            # Rank 0 has the most batches.
            lacking = len(range(0, len(chosen[:: ranks.world_size]), share)) - len(chunks)
            chunks += [[chosen[0]]] * lacking
            self._counts += [0] * lacking
        workers = min(workers, len(chunks)) if len(chunks) > 1 else 0
        # In loader processes each sample seeds the generators, as in training.
        places = [[chunk, chunk] for chunk in chunks]
        self._loader: DataLoader[Any] | None = DataLoader(
            MicroBatchDataset(dataset, seed=0),
            batch_sampler=places,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=prefetch if workers else None,
            pin_memory=pin_memory,
            worker_init_fn=start_worker if workers else None,
            # An own generator: the loader must not draw from the global generator, which is saved.
            generator=torch.Generator().manual_seed(0),
        )

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        if self._loader is None:
            raise ValueError("these batches were closed")
        return zip(self._loader, self._counts, strict=True)

    def close(self) -> None:
        """End the loader processes."""
        self._loader = None


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
