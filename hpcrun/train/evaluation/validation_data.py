"""Validation batches: every sample on exactly one rank, the same samples each time, no padding."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hpcrun.ranks.collective import Ranks
from hpcrun.train.data import order
from hpcrun.train.data.batches import MicroBatchDataset, length
from hpcrun.train.data.workers import start_worker


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
