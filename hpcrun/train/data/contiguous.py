"""DistributedSampler: a contiguous range of samples for each rank, in a fixed order."""

from collections.abc import Iterator

import torch.distributed as dist
from torch.utils.data import Sampler


class DistributedSampler(Sampler[int]):
    """The samples of a rank: the range ``start_idx`` to ``end_idx - 1``, the same in every epoch.

    Use :meth:`get_indices`, or pass the object as ``sampler=`` of a ``DataLoader``. All ranks have the same
    number of samples; the last ``dataset_size % world_size`` samples belong to no rank. For a new random
    order in each epoch use ``torch.utils.data.DistributedSampler``, or :func:`hpcrun.training_steps`.

    Args:
        dataset_size: number of samples of the dataset.
        batch_size: samples of a batch of this rank; for :attr:`num_batches`.
        rank: number of this rank; None: that of the process group, or 0 without a group.
        world_size: number of ranks; None: that of the process group, or 1.

    Attributes:
        num_samples: number of samples of each rank.
        start_idx: the first index of this rank.
        end_idx: the index after the last of this rank.

    Raises:
        ValueError: a rank would have no sample, ``batch_size`` is below 1, or ``rank`` is not below
            ``world_size``.
    """

    def __init__(
        self,
        dataset_size: int,
        batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        ready = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if ready else 0
        size = world_size if world_size is not None else dist.get_world_size() if ready else 1
        self.world_size, self.dataset_size, self.batch_size = size, dataset_size, batch_size
        if size < 1 or not 0 <= self.rank < size:
            raise ValueError(
                f"rank={self.rank}, world_size={size}: give a rank from 0 to world_size - 1"
            )
        if dataset_size < size or batch_size < 1:
            raise ValueError(
                f"dataset_size={dataset_size}, batch_size={batch_size}: each of {size} ranks needs at least "
                "1 sample, in batches of at least 1"
            )
        self.num_samples = dataset_size // size
        self.start_idx = self.rank * self.num_samples
        self.end_idx = self.start_idx + self.num_samples

    @property
    def num_batches(self) -> int:
        """Number of batches of this rank; the last one may be smaller."""
        return -(-self.num_samples // self.batch_size)

    def get_indices(self) -> range:
        """Return the indices of this rank's samples."""
        return range(self.start_idx, self.end_idx)

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over the indices of this rank."""
        return iter(self.get_indices())

    def __len__(self) -> int:
        """Return the number of samples of this rank."""
        return self.num_samples
