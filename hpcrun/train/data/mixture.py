"""Mixture: several map-style datasets in one order, by weights.

The sample at a global position is a pure function of (seed, position), as without a mixture (invariant 5).
Each block of 4096 consecutive positions has the same number of samples of each dataset, in an order that
the seed and the number of the block determine. Each dataset is read in separate passes: a pass has each
sample once, in the order of `hpcrun/train/data/batching.py:samples`. Two passes may overlap within a block.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from hpcrun.errors import UserError
from hpcrun.train.data import batching as order
from hpcrun.train.data.batching import Indices

BLOCK = 4096
"""Positions in which every dataset has exactly its share; a share is a multiple of 1/4096."""

_BLOCKS_SEED = 0x5851F42D4C957F2D
_DATASET_SEED = 0x14057B7EF767814F
"""Numbers that separate the permutations of blocks and of datasets; any odd 64-bit numbers do."""


class Mixture(Dataset[Any]):
    """Map-style dataset of the samples of several datasets; training takes them in the ratio of weights.

    In training, each block of 4096 consecutive samples has the same number of samples of each dataset. Index
    i counts through the datasets one after the other. Validation reads the indices, so it weights each
    dataset by its size.

    Attributes:
        datasets: the datasets.
        sizes: number of samples of each dataset.
        counts: number of samples of each dataset in a block of 4096.
    """

    def __init__(self, datasets: Sequence[Dataset[Any]], weights: Sequence[float]) -> None:
        """Check the datasets and divide each block among them.

        Args:
            datasets: map-style datasets with a length.
            weights: one positive number for each dataset; only their ratio matters.

        Raises:
            UserError: a dataset is empty, the numbers of weights and datasets differ, or a weight is not
                positive or is below 1/4096 of all weights.
        """
        self.datasets = list(datasets)
        self.sizes = [len(dataset) for dataset in self.datasets]  # type: ignore[arg-type]
        if not all(self.sizes):
            raise UserError(
                f"data: dataset {self.sizes.index(0)} of the mixture has no samples; remove it"
            )
        self.counts = block_counts(weights)
        if len(self.counts) != len(self.datasets):
            raise UserError(
                f"data: {len(self.counts)} weights for {len(self.datasets)} datasets; give one for each"
            )
        self._starts = [0, *accumulate(self.sizes)]

    def __len__(self) -> int:
        """Return the number of samples of all datasets."""
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Raises:
            IndexError: ``index`` is not in ``range(len(self))``.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"no sample {index}: the mixture has {len(self)}, from 0")
        number = bisect_right(self._starts, index) - 1
        return self.datasets[number][index - self._starts[number]]

    def sample_order(self, positions: Indices, seed: int) -> Indices:
        """Return the index of the sample at each global position; a pure function of the arguments.

        Args:
            positions: int64 of shape (n,), counted over all ranks from the start of training.
            seed: the config's ``seed``.

        Returns:
            int64 of shape (n,), each in ``range(len(self))``.
        """
        if len(self.datasets) == 1:
            return order.samples(positions, self.sizes[0], seed)
        numbers, ordinals = divided(positions, self.counts, seed)
        indices = np.empty_like(ordinals)
        for number, (size, start) in enumerate(zip(self.sizes, self._starts, strict=False)):
            mine = numbers == number
            own = (seed + (number + 1) * _DATASET_SEED) % 2**64
            indices[mine] = start + order.samples(ordinals[mine], size, own)
        return indices

    def shares(self) -> list[float]:
        """Return the fraction of the training samples that each dataset gives, a multiple of 1/4096."""
        return [count / BLOCK for count in self.counts]


def divided(positions: Indices, counts: Sequence[int], seed: int) -> tuple[Indices, Indices]:
    """Return for each global position the number of its dataset, and which sample of that dataset it is.

    The second number counts the dataset's samples from the start of training, over all passes.
    """
    starts = np.array([0, *accumulate(counts)], dtype=np.int64)
    within = order.samples(positions, BLOCK, seed ^ _BLOCKS_SEED)
    numbers = np.searchsorted(starts, within, side="right") - 1
    per_block = np.array(counts, dtype=np.int64)[numbers]
    return numbers, positions // BLOCK * per_block + within - starts[numbers]


def block_counts(weights: Sequence[float]) -> list[int]:
    """Return the samples of each dataset in a block: the weights' shares, rounded by largest remainder.

    Raises:
        UserError: a weight is not a positive number, or its share is below 1/4096.
    """
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise UserError(f"data: the weights {list(weights)} of a mixture must be positive numbers")
    exact = [weight * BLOCK / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: counts[number] - exact[number])
    for number in by_remainder[: BLOCK - sum(counts)]:
        counts[number] += 1
    if not all(counts):
        raise UserError(
            f"data: the weight {weights[counts.index(0)]:g} is less than 1/{BLOCK} of all weights; "
            "raise it, or remove the dataset"
        )
    return counts
