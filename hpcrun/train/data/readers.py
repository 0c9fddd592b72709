"""Readers of a map-style dataset: they read and collate a batch, under generators that its position seeds.

They run where the samples are read: in a loader process, or in the training process.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from hpcrun.checkpoint.state.generators import seed_at, set_apart
from hpcrun.train.data.found_generators import generators_in, seed_with
from hpcrun.train.data.sample_hash import comparable

Places = list[Sequence[int]]
"""A micro-batch's samples: the sequence of their global positions, and of their dataset indices."""


class Read(NamedTuple):
    """A batch to read: its seed, the pass, and its indices as the sampler gave them.

    ``probe``: read the samples of ``indices``, a list, and return a :class:`Probed` in place of a batch.
    """

    seed: int
    epoch: int
    indices: Any
    probe: bool = False


class Probed(NamedTuple):
    """The hash of some samples; None: they cannot be compared, or are all equal."""

    content: str | None


class BatchReader(Dataset[Any]):
    """Map-style dataset of collated batches of the user's dataset.

    Args:
        dataset: the user's dataset.
        collate: makes a batch from its samples.
        batched: True if a batch has a list of indices, False if it has one index.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], *, batched: bool = True
    ) -> None:
        self.dataset, self._collate, self._batched = dataset, collate, batched

    def read(self, indices: Any) -> Any:
        """Return the samples; uses the dataset's own ``__getitems__`` if it has one."""
        if not self._batched:
            return self.dataset[indices]
        at_once = getattr(self.dataset, "__getitems__", None)
        return at_once(indices) if at_once else [self.dataset[index] for index in indices]


class SampleSeeded(BatchReader):
    """Reader of the Task loop: a loader process seeds its generators from each sample's position."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], seed: int) -> None:
        super().__init__(dataset, collate)
        self._seed = seed

    def __getitem__(self, places: Places) -> Any:
        """Return the collated micro-batch of ``places``."""
        positions, indices = places
        if get_worker_info() is None:
            return self._collate(self.read(indices))
        return self._collate(list(map(self._seeded, positions, indices)))

    def _seeded(self, position: int, index: int) -> Any:
        seed_at(self._seed, position)
        return self.dataset[index]


class BatchSeeded(BatchReader):
    """Reader of a user's loop: every process seeds its generators, and those of the user, for each batch."""

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], *, batched: bool = True
    ) -> None:
        super().__init__(dataset, collate, batched=batched)
        self._generators: list[Any] | None = None
        self._epoch: int | None = None

    def __getitem__(self, read: Read) -> Any:
        """Return the collated batch of ``read``."""
        with set_apart():
            self._begin(read)
            if read.probe:
                return Probed(self._probe(read))
            return self._collate(self.read(read.indices))

    def _probe(self, read: Read) -> str | None:
        """Hash samples that are read with one seed.

        Equal samples depend on no index, as those of a benchmark: zeros, or random numbers, which differ
        between ranks in the training.
        """
        found = []
        for index in read.indices:
            self._begin(read)
            found.append(comparable(self.read([index]) if self._batched else self.dataset[index]))
        if None in found or (len(found) > 1 and len(set(found)) == 1):
            return None
        return comparable(found)

    def _begin(self, read: Read) -> None:
        if self._epoch != read.epoch:
            self._epoch = read.epoch
            # A persistent worker has a copy, which does not see the call in the training process.
            set_epoch(self.dataset, read.epoch)
        if self._generators is None:
            self._generators = generators_in(self.dataset, self._collate)
        seed_with(read.seed, self._generators)

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned must search its own copies.
        return {**vars(self), "_generators": None, "_epoch": None}


def set_epoch(value: Any, epoch: int) -> None:
    """Call ``value.set_epoch(epoch)`` if ``value`` has this method."""
    way = getattr(value, "set_epoch", None)
    if callable(way):
        way(epoch)
