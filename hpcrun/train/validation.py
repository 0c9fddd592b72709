"""Validation: its samples, the loss over all ranks, and when to stop early."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hpcrun.checkpoint.state.generators import kept_generators
from hpcrun.ranks.collective import Ranks
from hpcrun.train.data.batches import MicroBatchDataset, length
from hpcrun.train.data.batching import samples, start_worker
from hpcrun.train.metrics.log import mean_over_ranks
from hpcrun.train.model.checks import evaluating, kept_buffers, require_number
from hpcrun.train.parallel.strategies import copy_from_rank_zero
from hpcrun.train.step.precision import to_device
from hpcrun.train.step.trainer import AMPTrainer
from hpcrun.train.task import Task


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
            limit: use only as many samples as this number of global batches holds. They are the same each
                time and spread over the dataset, which may be sorted. None: all samples.
            same_count: give all ranks the same number of batches; additional batches hold one sample of
                weight 0.
            workers: maximum number of loader processes; 0 reads in this process.
        """
        size = length(dataset)
        chosen: Any = range(size)
        if limit is not None and limit * batch_size < size:
            positions = np.arange(limit * batch_size, dtype=np.int64)
            chosen = sorted(samples(positions, size, seed=0).tolist())
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
            given = task.weight(batch) if samples else 0.0
            weight = float(samples if given is None else given)
            if weight:  # With weight 0 the loss may be NaN, the mean of no samples.
                total += loss.item() * weight
                count += weight
        trainer.after_evaluation()
    return mean_over_ranks(total, count, ranks)


@dataclass
class EarlyStopping:
    """Early stopping on losses that are identical on all ranks, so all ranks decide the same.

    ``best`` is the lowest loss and ``best_step`` its step; ``waited`` counts the validations since. ``seen``
    and ``loss`` are the last validation's step and loss. A checkpoint holds all of these.
    """

    patience: int | None = None
    best: float | None = None
    best_step: int | None = None
    waited: int = 0
    seen: int | None = None
    loss: float | None = None

    @property
    def due(self) -> bool:
        """True if training ends after the step of the last validation."""
        return self.patience is not None and self.waited >= self.patience

    def end(self, steps: int) -> int:
        """Return the step after which training ends: ``steps``, or the step of an early stop."""
        return self.seen if self.due and self.seen is not None else steps

    def record(self, step: int, loss: float | None) -> bool:
        """Record the loss of a validation after ``step`` steps; return True if it is the best so far."""
        if loss is None:
            return False
        self.seen, self.loss = step, loss
        if not math.isfinite(loss) or (self.best is not None and loss >= self.best):
            self.waited += 1
            return False
        self.best, self.best_step, self.waited = loss, step, 0
        return True

    def reason(self) -> str:
        """Return the reason for the end of training, once it is due."""
        best = ""
        if self.best is not None:
            best = f"; the best was {self.best:.6g}, at step {self.best_step}"
        validations = "1 validation" if self.waited == 1 else f"{self.waited} validations"
        return f"at step {self.seen}: {validations} without a better loss{best}"

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded values as plain data, without ``patience``."""
        return {key: value for key, value in asdict(self).items() if key != "patience"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for key in self.state_dict():
            setattr(self, key, state[key])
