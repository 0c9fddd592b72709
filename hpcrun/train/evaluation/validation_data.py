"""What is validated on: every sample on exactly one rank, the same ones each time, none padded."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from hpcrun.train.data import order
from hpcrun.train.data.batches import Placed, length
from hpcrun.train.data.workers import start_worker


class ValidationData:
    """This rank's batches, each with its number of samples; iterated once for each validation.

    Its loader processes start with the first validation and wait for the next one.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        accumulation: int,
        limit: int | None,
        alike: bool = False,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        """Choose the samples; nothing is read yet.

        Args:
            batch_size: as in training; a batch is no larger than training's micro-batches.
            limit: as many samples as so many batches over all ranks hold, the same ones each time, taken
                from all over the dataset, which may be sorted; None: all.
            alike: give all ranks as many batches; those beyond a rank's own hold a sample that counts 0.
            workers: loader processes, at most; 0 reads in this one.
            prefetch: batches that each of them reads ahead.
            collate: makes a batch of its samples.
        """
        size = length(dataset)
        chosen: Any = range(size)
        if limit is not None and limit * batch_size < size:
            positions = np.arange(limit * batch_size, dtype=np.int64)
            chosen = sorted(order.samples(positions, size, seed=0).tolist())
        mine = list(chosen[rank::world_size])
        share = max(1, batch_size // (world_size * accumulation))
        chunks = [mine[start : start + share] for start in range(0, len(mine), share)]
        self._counts = [len(chunk) for chunk in chunks]
        if alike:
            # Rank 0 has the most.
            lacking = len(range(0, len(chosen[::world_size]), share)) - len(chunks)
            chunks += [[chosen[0]]] * lacking
            self._counts += [0] * lacking
        workers = min(workers, len(chunks)) if len(chunks) > 1 else 0
        # In loader processes the generators follow from the sample, as in training.
        places = [[chunk, chunk] for chunk in chunks]
        self._loader: DataLoader[Any] | None = DataLoader(
            Placed(dataset, seed=0),
            batch_sampler=places,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=prefetch if workers else None,
            pin_memory=pin_memory,
            worker_init_fn=start_worker if workers else None,
            # Not a number from the generator that is saved.
            generator=torch.Generator().manual_seed(0),
        )

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        if self._loader is None:
            raise ValueError("these batches were closed")
        return zip(self._loader, self._counts, strict=True)

    def close(self) -> None:
        """End the loader processes."""
        self._loader = None
