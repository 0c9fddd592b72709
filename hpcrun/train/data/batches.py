"""Batches for a rank, from any step on: in the order that order.py fixes, or from a stream (streams.py)."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
)

from hpcrun.errors import UserError
from hpcrun.train.data import order
from hpcrun.train.data.batching import Batching, Uneven
from hpcrun.train.data.streams import Shape, StreamState, StreamSteps, require_stream
from hpcrun.train.data.workers import reseed, start_worker

Places = list[Sequence[int]]
"""The samples of a micro-batch: a sequence of their global positions, and one of their dataset indices."""

_PLACES_AT_ONCE = 4096


class Steps(Protocol):
    """The micro-batches of one rank, step by step."""

    @property
    def batching(self) -> Batching:
        """How many samples they hold, on this rank and on the others."""
        ...

    def __iter__(self) -> Iterator[list[Any]]: ...

    def __next__(self) -> list[Any]:
        """Those of the next step."""
        ...

    def close(self) -> None:
        """End the loader processes."""
        ...

    def saved(self, done: int) -> StreamState:
        """What a checkpoint after ``done`` steps must hold for training to go on in the data."""
        ...


class _MicroBatches(Sampler[Places]):
    """The places of the micro-batches of one rank from a step to the end."""

    def __init__(
        self, dataset_size: int, steps: range, rank: int, batching: Batching, seed: int
    ) -> None:
        self._size, self._steps, self._seed = dataset_size, steps, seed
        self._rank, self._batching = rank, batching

    def __iter__(self) -> Iterator[Places]:
        # Many steps at once: a call of numpy's costs as much for one sample as for hundreds.
        at_once = max(
            1, _PLACES_AT_ONCE // max(1, self._batching.batch_size // self._batching.ranks)
        )
        for first in range(self._steps.start, self._steps.stop, at_once):
            parts = [
                positions
                for step in range(first, min(first + at_once, self._steps.stop))
                for positions in self._batching.positions(step, self._rank)
            ]
            indices = order.samples(np.concatenate(parts), self._size, self._seed)
            start = 0
            for part in parts:
                # Only now: thousands of numbers at once would drive the step's data out of the caches.
                end, position = start + len(part), int(part[0])
                yield [range(position, position + len(part)), indices[start:end].tolist()]
                start = end


class Placed(Dataset[Any]):
    """The user's dataset, asked for the samples of a micro-batch.

    In a loader's worker process the generators are re-seeded from each sample's position.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._at_once = getattr(dataset, "__getitems__", None)

    def __getitems__(self, places: Places) -> list[Any]:
        """A whole batch, as torch's loader asks first; by the dataset's own ``__getitems__`` if any."""
        positions, indices = places
        if get_worker_info() is not None:
            return list(map(self._seeded, positions, indices))
        if self._at_once is not None:
            found: list[Any] = self._at_once(indices)
            return found
        dataset = self._dataset
        return [dataset[index] for index in indices]

    def _seeded(self, position: int, index: int) -> Any:
        reseed(self._seed, position)
        return self._dataset[index]


def require_trainable(dataset: Dataset[Any], ranks: int, workers: int) -> None:
    """Raise UserError unless ``ranks`` ranks with ``workers`` loader processes each can train on it."""
    if isinstance(dataset, IterableDataset):
        require_stream(dataset, ranks, workers)
    else:
        length(dataset)
        if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
            raise UserError(
                f"data: {type(dataset).__name__} gives no sample by its number; give it __getitem__"
            )


def length(dataset: Dataset[Any]) -> int:
    """The number of samples; raises UserError for a dataset that has none or cannot tell."""
    if isinstance(dataset, DataLoader):
        raise UserError(
            "data: the task gave a DataLoader; return its dataset, hpcrun makes the batches "
            "(train.batch_size, data.workers, and the task's collate() for a collate_fn)"
        )
    if isinstance(dataset, IterableDataset):
        raise UserError(
            f"data: {type(dataset).__name__} is a stream, which only training reads; give a map-style "
            "dataset to validate on"
        )
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise UserError(
            f"data: {type(dataset).__name__} has no length; give a map-style dataset"
        ) from error
    if size < 1:
        raise UserError(f"data: {type(dataset).__name__} holds no samples; check the data options")
    return size


def training_steps(
    dataset: Dataset[Any],
    steps: range,
    *,
    rank: int,
    world_size: int,
    batch_size: int,
    accumulation: int,
    seed: int,
    workers: int,
    pin_memory: bool,
    saved: StreamState | None = None,
    uneven: Uneven = "across",
    prefetch: int = 2,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Steps:
    """The micro-batches of this rank for each step of ``steps``; close it to end its workers.

    Args:
        batch_size: samples of one optimiser step over all ranks and micro-batches.
        workers: DataLoader processes; 0 reads in this one.
        saved: for a stream, where it stood after ``steps.start`` steps.
        uneven: what becomes of an epoch's last, incomplete batch: see ``train.uneven``.
        prefetch: batches that each of the workers reads ahead.
        collate: makes a micro-batch of its samples.

    Raises:
        UserError: at once, if the dataset has no samples or no length, or is a stream that cannot go on,
            or its samples do not make a single batch.
    """
    if isinstance(dataset, IterableDataset):
        require_stream(dataset, world_size, workers)
        batching = _of_stream(dataset, Batching(batch_size, world_size, accumulation, uneven))
        shape = Shape(rank, batching, workers, prefetch, collate)
        return StreamSteps(dataset, steps, shape, seed=seed, pin_memory=pin_memory, saved=saved)
    size = length(dataset)
    batching = Batching(batch_size, world_size, accumulation, uneven, size)
    if not batching.steps_per_epoch:
        raise UserError(
            f"train.uneven: drop would leave out all of the {size} samples, which make no batch of "
            f"{batch_size}; use a smaller train.batch_size, or another train.uneven"
        )
    placed, places = Placed(dataset, seed), _MicroBatches(size, steps, rank, batching, seed)
    if not workers and not pin_memory:
        # What a loader does in its own process, without what it does for others.
        here = (collate(placed.__getitems__(batch)) for batch in places)
        return _Indexed(_by_step(here, steps, batching), batching)
    loader: DataLoader[Any] = DataLoader(
        placed,
        batch_sampler=places,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch if workers else None,
        worker_init_fn=start_worker if workers else None,
        # A generator of its own: the loader draws its workers' seed from the global one otherwise,
        # and a resumed run would draw once more than an undisturbed one.
        generator=torch.Generator().manual_seed(seed),
    )
    return _Indexed(_by_step(loader, steps, batching), batching)


def _of_stream(stream: IterableDataset[Any], batching: Batching) -> Batching:
    """``batching``, if a stream can be read so; raises UserError."""
    name = type(stream).__name__
    if batching.uneven != "across":
        raise UserError(
            f"train.uneven: {batching.uneven} is about the end of an epoch, and data: {name} is a stream, "
            "whose end is known when it is over; use across: each reader begins a new pass of its own"
        )
    if batching.batch_size < batching.ranks * batching.accumulation:
        raise UserError(
            f"train.batch_size: {batching.batch_size} samples give some of {batching.ranks} ranks x "
            f"{batching.accumulation} micro-batches none, and data: {name}, a stream, has no stand-in "
            "for them; use a larger train.micro_batch"
        )
    return batching


class _Indexed:
    """The steps of a map-style dataset, where the number of steps says all."""

    def __init__(self, steps: Generator[list[Any], None, None], batching: Batching) -> None:
        self._steps, self._batching = steps, batching

    @property
    def batching(self) -> Batching:
        return self._batching

    def __iter__(self) -> Iterator[list[Any]]:
        return self._steps

    def __next__(self) -> list[Any]:
        return next(self._steps)

    def close(self) -> None:
        self._steps.close()

    def saved(self, done: int) -> StreamState:
        return StreamState({}, {})


def _by_step(
    loader: Iterable[Any], steps: range, batching: Batching
) -> Generator[list[Any], None, None]:
    batches = iter(loader)
    for step in steps:
        yield [next(batches) for _ in range(batching.micro_batches(step))]
