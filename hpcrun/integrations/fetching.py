"""Datasets around the user's dataset: each batch is read under generators that its position seeds.

The wrappers run where the samples are read: in the loader's worker processes, or in the training process.
They read a whole batch and collate it, so that random values of the collate function are seeded too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from hpcrun.integrations.random_state import generators_in, seed_with, set_apart
from hpcrun.ranks.signals import ignore_in_helper_process


class Order(NamedTuple):
    """A batch to read: its seed, the pass, and its indices as the sampler gave them."""

    seed: int
    epoch: int
    indices: Any


class SeededDataset(Dataset[Any]):
    """Map-style dataset of batches: an index is an :class:`Order`, and an item is a collated batch.

    Args:
        dataset: the user's dataset.
        collate: the collate function of the user's loader.
        batched: True if an order has a list of indices, False if it has one index.
    """

    first = 0

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], batched: bool) -> None:
        self.dataset, self._collate, self._batched = dataset, collate, batched
        self._generators: list[Any] | None = None
        self._epoch: int | None = None

    def __getitem__(self, order: Order) -> Any:
        """Return the collated batch of ``order``."""
        with set_apart():
            self._begin(order)
            return self._collate(self._read(order.indices))

    def _begin(self, order: Order) -> None:
        if self._epoch != order.epoch:
            self._epoch = order.epoch
            # A persistent worker has a copy, which does not see the call in the training process.
            set_epoch(self.dataset, order.epoch)
        if self._generators is None:
            self._generators = generators_in(self.dataset, self._collate)
        seed_with(order.seed, self._generators)

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned must search its own copies.
        return {**vars(self), "_generators": None, "_epoch": None}

    def _read(self, indices: Any) -> Any:
        if not self._batched:
            return self.dataset[indices]
        at_once = getattr(self.dataset, "__getitems__", None)
        return at_once(indices) if at_once else [self.dataset[index] for index in indices]


def set_epoch(value: Any, epoch: int) -> None:
    """Call ``value.set_epoch(epoch)`` if ``value`` has this method."""
    way = getattr(value, "set_epoch", None)
    if callable(way):
        way(epoch)


class WorkerStart:
    """Start of a worker process: it ignores the signals of the ranks, and calls the user's function.

    The user's code sees its own dataset in ``get_worker_info()``, and the number of its reader.
    """

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self._user = user

    def __call__(self, worker: int) -> None:
        """Set up the worker process with this number."""
        ignore_in_helper_process()
        info: Any = get_worker_info()
        wrapper = info.dataset
        reader = (worker + wrapper.first) % info.num_workers
        # The class refuses other ways to change a field.
        object.__setattr__(info, "id", reader)
        object.__setattr__(info, "seed", info.seed - worker + reader)
        object.__setattr__(info, "dataset", wrapper.dataset)
        if self._user is not None:
            self._user(reader)
