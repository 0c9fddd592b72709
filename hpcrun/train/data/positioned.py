"""The loader of every training: it reads whole batches from a position on, and nothing before.

What it reads is decided by one of two orders: the pure function of the Task loop
(:class:`hpcrun.train.data.batches.PureOrder`), or the sampler of the user
(:class:`hpcrun.train.data.sampler_order.SamplerOrder`). An iterable dataset is read by a :class:`LedStream`,
which continues in the middle of a pass.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from hpcrun.ranks.signals import ignore_in_helper_process


@dataclass(frozen=True)
class Settings:
    """Loader processes, as in ``torch.utils.data.DataLoader``: 0 ``workers`` read in this process.

    ``start``: the user's function for the start of a worker. ``context``: the user's context of
    multiprocessing.
    """

    workers: int = 0
    prefetch: int | None = 2
    pin_memory: bool = False
    persistent: bool = False
    timeout: float = 0
    context: Any = None
    start: Callable[[int], None] | None = None


class LedStream(IterableDataset[Any]):
    """Iterable dataset that several processes read from the middle of a pass on.

    A loader takes batches from its processes in turn and always begins with process 0. After a resume, the
    next batch may belong to another process, so the processes before it first give an empty item each.

    Attributes:
        dataset: the user's dataset.
        lead: number of processes that first give an empty item.
    """

    dataset: Any
    lead: int = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number = 0 if info is None else info.id
        if number < self.lead:
            yield None
        yield from self.items(number)

    @abstractmethod
    def items(self, number: int) -> Iterator[Any]:
        """Yield the items of the process with this number, from its position on."""


class PositionedLoader:
    """A loader of whole batches; each iteration begins at the position of its order or stream.

    Args:
        source: gives a collated batch for each item of ``order``, or is a :class:`LedStream`; its ``dataset``
            is that of the user.
        order: what to read, from the current position on; None: ``source`` is a stream.
        settings: of the loader processes.
        seed: seed of the loader processes; :meth:`seed` replaces it.
    """

    def __init__(
        self,
        source: Dataset[Any],
        order: Iterable[Any] | None,
        settings: Settings,
        seed: int | None = None,
    ) -> None:
        self._source: Any = source
        self._order = order
        workers = settings.workers
        # An own generator: otherwise the loader draws its workers' seed from the global generator, and a
        # resumed run would draw once more than an uninterrupted run.
        self._generator = torch.Generator()
        if seed is not None:
            self.seed(seed)
        self._loader: DataLoader[Any] | None = None
        if order is not None and not workers and not settings.pin_memory:
            return  # the same as a DataLoader in this process, without its overhead
        self._loader = DataLoader(
            source,
            batch_size=None,
            sampler=order,
            collate_fn=_as_it_is,
            num_workers=workers,
            pin_memory=settings.pin_memory,
            timeout=settings.timeout,
            worker_init_fn=WorkerStart(settings.start) if workers else None,
            multiprocessing_context=settings.context if workers else None,
            prefetch_factor=settings.prefetch if workers else None,
            # A worker that stays would not see the start of the next pass of a stream.
            persistent_workers=settings.persistent and order is not None and workers > 0,
            generator=self._generator,
        )

    def seed(self, seed: int) -> None:
        """Seed the loader processes of the next iteration."""
        self._generator.manual_seed(seed)

    def __iter__(self) -> Iterator[Any]:
        """Return the batches from the current position on."""
        if self._loader is None:
            return (self._source[item] for item in self._order or ())
        items = iter(self._loader)
        for _ in range(self._source.lead if self._order is None else 0):
            next(items)
        return items


class WorkerStart:
    """Start of a loader process: it ignores the signals of the ranks, and calls the user's function.

    The user's code sees its own dataset in ``get_worker_info()``.
    """

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self._user = user

    def __call__(self, worker: int) -> None:
        """Set up the loader process with this number."""
        ignore_in_helper_process()
        info: Any = get_worker_info()
        # The class refuses other ways to change a field.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._user is not None:
            self._user(worker)


def _as_it_is(batch: Any) -> Any:
    return batch
