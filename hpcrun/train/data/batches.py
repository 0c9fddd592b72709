"""Batches of a rank from any step on: of a map-style dataset or of a stream."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

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

from hpcrun.checkpoint.state.generators import seed_at
from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.train.data.batching import (
    Batching,
    Indices,
    accumulation_of,
    samples,
    start_worker,
)
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.data.streams import Shape, StreamState, StreamSteps, require_stream

Places = list[Sequence[int]]
"""A micro-batch's samples: the sequence of their global positions, and of their dataset indices."""

Order = Callable[[Indices], Indices]
"""Function from global positions to dataset indices."""

_PLACES_AT_ONCE = 4096


class Steps:
    """Iterator over the steps of one rank; each item holds the step's micro-batches.

    ``batching``: numbers of samples in the micro-batches, on all ranks. ``saved(done)`` returns what a
    checkpoint after ``done`` steps needs to resume in the data; a map-style dataset needs nothing.
    """

    def __init__(
        self,
        steps: Generator[MicroBatches, None, None],
        batching: Batching,
        saved: Callable[[int], StreamState] = lambda _: StreamState({}, {}),
    ) -> None:
        self._steps, self.batching, self.saved = steps, batching, saved

    def __iter__(self) -> Iterator[MicroBatches]:
        return self._steps

    def __next__(self) -> MicroBatches:
        return next(self._steps)

    def close(self) -> None:
        """End the loader processes."""
        self._steps.close()


class _MicroBatches(Sampler[Places]):
    """Sampler of one rank's micro-batches: positions and dataset indices."""

    def __init__(self, ordered: Order, steps: range, rank: int, batching: Batching) -> None:
        self._ordered, self._steps = ordered, steps
        self._rank, self._batching = rank, batching

    def __iter__(self) -> Iterator[Places]:
        # Many steps in one call: numpy takes as long for one sample as for hundreds.
        at_once = max(
            1, _PLACES_AT_ONCE // max(1, self._batching.batch_size // self._batching.ranks)
        )
        for first in range(self._steps.start, self._steps.stop, at_once):
            parts = [
                positions
                for step in range(first, min(first + at_once, self._steps.stop))
                for positions in self._batching.positions(step, self._rank)
            ]
            indices = self._ordered(np.concatenate(parts))
            start = 0
            for part in parts:
                # Convert late: thousands of Python integers at a time evict the step's data from caches.
                end, position = start + len(part), int(part[0])
                yield [range(position, position + len(part)), indices[start:end].tolist()]
                start = end


class MicroBatchDataset(Dataset[Any]):
    """Wrapper of the user's dataset that reads the samples of a micro-batch.

    A loader process re-seeds its generators from each sample's position.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._at_once = getattr(dataset, "__getitems__", None)

    def __getitems__(self, places: Places) -> list[Any]:
        """Return the samples of a batch; uses the dataset's own ``__getitems__`` if it has one."""
        positions, indices = places
        if get_worker_info() is not None:
            return list(map(self._seeded, positions, indices))
        if self._at_once is not None:
            found: list[Any] = self._at_once(indices)
            return found
        dataset = self._dataset
        return [dataset[index] for index in indices]

    def _seeded(self, position: int, index: int) -> Any:
        seed_at(self._seed, position)
        return self._dataset[index]


def require_trainable(dataset: Dataset[Any], ranks: int, workers: int) -> None:
    """Raise UserError if training on ``ranks`` ranks with ``workers`` loader processes is impossible."""
    if isinstance(dataset, IterableDataset):
        require_stream(dataset, ranks, workers)
    else:
        length(dataset)
        if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__"):
            raise UserError(
                f"data: {type(dataset).__name__} cannot return a sample by index; give it __getitem__"
            )


def require_any_ranks(dataset: Dataset[Any], config: Config) -> None:
    """Raise UserError if a stream cannot continue on every number of nodes of the range ``job.nodes``."""
    if not isinstance(dataset, IterableDataset):
        return
    job, name = config.job, type(dataset).__name__
    if getattr(dataset, "shards_itself", None):
        raise UserError(
            f"data: {name} shards itself, so a resume needs the same number of ranks, but job.nodes is "
            f"{job.nodes}; use one number of nodes"
        )
    counts = range(job.min_nodes, job.max_nodes + 1)
    ranks = {nodes: nodes * job.tasks_on_node for nodes in counts}
    fit = [
        nodes
        for nodes in counts
        if ranks[nodes] * accumulation_of(config, ranks[nodes]) <= config.train.batch_size
    ]
    if len(fit) < len(counts):
        raise UserError(
            f"train.batch_size: {config.train.batch_size} samples do not give every micro-batch a sample on "
            f"each number of nodes in {job.nodes}, and data: {name}, a stream, has no padding; numbers that "
            f"work: {', '.join(map(str, fit)) or 'none'}; use one of them, or a larger train.batch_size"
        )


def length(dataset: Dataset[Any]) -> int:
    """Return the number of samples; raises UserError for a dataset without samples or length."""
    if isinstance(dataset, DataLoader):
        raise UserError(
            "data: the task gave a DataLoader; return its dataset, hpcrun makes the batches "
            "(train.batch_size, data.workers, and the task's collate() for a collate_fn)"
        )
    if isinstance(dataset, IterableDataset):
        raise UserError(
            f"data: {type(dataset).__name__} is a stream, which works for training only; give a map-style "
            "dataset for validation"
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
    prefetch: int = 2,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Steps:
    """Return the micro-batches of this rank for each step; ``close()`` ends the loader processes.

    The order of a map-style dataset is a pure function of seed, epoch and index: it does not depend on the
    number of ranks, so that a resume may begin at any step. Each item is a :class:`MicroBatches`, with
    tensors on the CPU and the samples as the first dimension.

    Args:
        dataset: a map-style dataset, or a stream with ``state_dict()`` and ``load_state_dict()``.
        steps: the steps to take, such as ``range(done, 1000)``.
        rank: number of this rank.
        world_size: number of ranks.
        batch_size: samples of one optimizer step over all ranks and micro-batches.
        accumulation: micro-batches of one optimizer step on each rank.
        seed: seed of the order, and of the loader processes' generators.
        workers: DataLoader processes; 0 reads in this process.
        pin_memory: copy batches to page-locked memory, for faster copies to a GPU.
        saved: for a stream, its position after ``steps.start`` steps, from ``saved()`` of the result.
        prefetch: batches that each loader process reads ahead.
        collate: makes a micro-batch from its samples.

    Raises:
        UserError: the dataset has no samples or no length, or is a stream that cannot resume.
    """
    if isinstance(dataset, IterableDataset):
        require_stream(dataset, world_size, workers)
        batching = Batching(batch_size, world_size, accumulation)
        _require_samples(dataset, batching)
        shape = Shape(rank, batching, workers, prefetch, collate)
        stream = StreamSteps(dataset, steps, shape, seed, saved)
        return Steps(stream.read(pin_memory=pin_memory), batching, stream.saved)
    size = length(dataset)
    batching = Batching(batch_size, world_size, accumulation, size)
    ordered = order_of(dataset, size, seed)
    placed, places = MicroBatchDataset(dataset, seed), _MicroBatches(ordered, steps, rank, batching)
    if not workers and not pin_memory:
        # Same as a DataLoader in this process, without its overhead.
        here = (collate(placed.__getitems__(batch)) for batch in places)
        return Steps(_by_step(here, steps, batching), batching)
    loader: DataLoader[Any] = DataLoader(
        placed,
        batch_sampler=places,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=pin_memory,
        prefetch_factor=prefetch if workers else None,
        worker_init_fn=start_worker if workers else None,
        # An own generator: otherwise the loader draws its workers' seed from the global generator, and a
        # resumed run would draw once more than an uninterrupted run.
        generator=torch.Generator().manual_seed(seed),
    )
    return Steps(_by_step(loader, steps, batching), batching)


def order_of(dataset: Dataset[Any], size: int, seed: int) -> Order:
    """Return the order of the samples: the dataset's own ``sample_order``, or a permutation per epoch."""
    own: Callable[[Indices, int], Indices] | None
    own = getattr(dataset, "sample_order", None)
    if own is None:
        return lambda positions: samples(positions, size, seed)
    return lambda positions: own(positions, seed)


def _require_samples(stream: IterableDataset[Any], batching: Batching) -> None:
    """Raise UserError if a micro-batch of a stream would have no sample."""
    if batching.batch_size < batching.ranks * batching.accumulation:
        raise UserError(
            f"train.batch_size: {batching.batch_size} samples are too few for {batching.ranks} ranks x "
            f"{batching.accumulation} micro-batches, and data: {type(stream).__name__}, a stream, has no "
            "padding; use a larger train.micro_batch"
        )


def _by_step(
    loader: Iterable[Any], steps: range, batching: Batching
) -> Generator[MicroBatches, None, None]:
    batches = iter(loader)
    for _ in steps:
        yield MicroBatches([next(batches) for _ in range(batching.accumulation)])
