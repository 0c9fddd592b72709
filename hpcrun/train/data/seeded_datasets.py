"""Datasets around the user's dataset: each batch is read under generators that its position seeds.

The wrappers run where the samples are read: in the loader's worker processes, or in the training process.
They read a whole batch and collate it, so that random values of the collate function are seeded too.
An iterable dataset starts in the middle of a pass by its own state, or by a replay. Its readers are the
processes that iterate it: each worker process, or the training process.
"""

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hpcrun.checkpoint.sharded.rank_file import pack
from hpcrun.checkpoint.state.generators import mixed, set_apart
from hpcrun.errors import UserError
from hpcrun.ranks.signals import ignore_in_helper_process
from hpcrun.train.data.found_generators import generators_in, seed_with


class Order(NamedTuple):
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
            if order.probe:
                return Probed(self._probe(order))
            return self._collate(self._read(order.indices))

    def _probe(self, order: Order) -> str | None:
        """Hash samples that are read with one seed.

        Equal samples depend on no index, as those of a benchmark: zeros, or random numbers, which differ
        between ranks in the training.
        """
        found = []
        for index in order.indices:
            self._begin(order)
            found.append(comparable(self._read([index]) if self._batched else self.dataset[index]))
        if None in found or (len(found) > 1 and len(set(found)) == 1):
            return None
        return comparable(found)

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


class Reader(NamedTuple):
    """Position of a reader: number of its batches, and the packed ``state`` of the dataset after them.

    ``check``: hash of its last batch if the dataset has no state. ``ended``: the pass has no more batches.
    """

    batches: int = 0
    state: bytes | None = None
    check: str | None = None
    ended: bool = False


class StreamItem(NamedTuple):
    """A batch, the number of its reader, and the position of the reader after it."""

    number: int
    reader: Reader
    batch: Any


class SeededStream(IterableDataset[StreamItem]):
    """Iterable dataset of collated batches, which can start in the middle of a pass.

    The loader takes batches from its workers in turn, beginning with worker 0. After a resume, the next batch
    may belong to another reader, so that worker 0 must do its work: ``first`` shifts the numbers.

    Args:
        dataset: the user's dataset.
        collate: the collate function of the user's loader.
        size: samples in a batch; None: an item of the dataset is a batch.
        drop_last: omit a last batch with fewer samples.

    Attributes:
        seed: seed of the pass.
        first: number of the reader that gives the next batch.
        starts: position of each reader; empty at the beginning of a pass.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], size: int | None, drop_last: bool
    ) -> None:
        self.dataset, self._collate, self._size, self._drop_last = dataset, collate, size, drop_last
        self.seed, self.first = 0, 0
        self.starts: list[Reader] = []
        self._with_state = has_state(dataset)

    def __iter__(self) -> Iterator[StreamItem]:
        info = get_worker_info()
        items = self._read(0 if info is None else info.id)
        while True:
            with set_apart():
                item = next(items, None)
            if item is None:
                return
            yield item

    def _read(self, number: int) -> Iterator[StreamItem]:
        start = self.starts[number] if self.starts else Reader()
        if start.ended:
            return
        generators = generators_in(self.dataset, self._collate)

        def seed(batch: int) -> None:
            seed_with(mixed(self.seed, number, batch), generators)

        seed(0)
        done = 0
        if self._with_state:
            self._require_plain()
        if self._with_state and start.state is not None:
            self.dataset.load_state_dict(_unpacked(start.state))
            done = start.batches
        samples = iter(self.dataset)
        while True:
            seed(done + 1)
            found = list(islice(samples, self._size or 1))
            if not found or (self._drop_last and len(found) < (self._size or 1)):
                return
            done += 1
            if done < start.batches:
                continue
            batch = self._collate(found if self._size else found[0])
            check = None if self._with_state else hash_of(batch)
            if done == start.batches:
                self._compare(check, start)
                continue
            state = pack(self.dataset.state_dict()) if self._with_state else None
            # A dataset that has ended may have gone back to its beginning.
            ended = len(found) < (self._size or 1)
            yield StreamItem(number, Reader(done, state, check, ended), batch)

    def _require_plain(self) -> None:
        """Raise UserError if the state of the dataset could not be loaded after an interruption."""
        try:
            _unpacked(pack(self.dataset.state_dict()))
        except pickle.UnpicklingError as error:
            raise UserError(
                f"{type(self.dataset).__name__}.state_dict() has more than numbers, texts, lists, dicts and "
                "tensors, and a load from a checkpoint runs no code; return these, such as a tensor in place "
                "of an array"
            ) from error

    def _compare(self, check: str | None, start: Reader) -> None:
        if check != start.check:
            raise UserError(
                f"{type(self.dataset).__name__}: its batch {start.batches} differs from the batch before the "
                "interruption, so a resume would repeat or skip samples; draw random values from the global "
                "generators, or define state_dict() and load_state_dict()"
            )


def _unpacked(content: bytes) -> Any:
    """Return the packed state; runs no code, and raises UnpicklingError for other objects."""
    return torch.load(io.BytesIO(content), weights_only=True)


def has_state(dataset: Any) -> bool:
    """Return True if the position of an iterable dataset can be saved and loaded.

    The package ``datasets`` (Hugging Face) is an exception: the state of its ``shuffle()`` lacks the samples
    in its buffer, and the states of several workers share one epoch.
    """
    ways = ("state_dict", "load_state_dict")
    theirs = type(dataset).__module__.partition(".")[0] == "datasets"
    return not theirs and all(callable(getattr(dataset, way, None)) for way in ways)


def comparable(samples: Any) -> str | None:
    """Return a hash of ``samples``; None if a part of them has no bytes, such as an open file."""
    try:
        return hash_of(samples, pickle.dumps)
    except Exception:  # any error of the objects in a sample means that they cannot be compared
        return None


def first_of_stream(batch: Any) -> str | None:
    """Return a hash of a batch; None if all its samples are equal, as in a benchmark."""
    with contextlib.suppress(Exception):  # as in comparable(): objects that cannot be compared
        if not any(map(_varies, tree_leaves(batch))):
            return None
    return comparable(batch)


def _varies(part: Any) -> bool:
    """Return True if a part of a batch may differ from that of other samples."""
    if isinstance(part, torch.Tensor | np.ndarray):
        one: Any = part.reshape(-1) if part.ndim == 0 or len(part) == 1 else part
        return bool((one != one[:1]).any()) or (one.shape == (1,) and bool(one[0] != 0))
    return not isinstance(part, int | float | None)


def hash_of(batch: Any, others: Callable[[Any], bytes] | None = None) -> str:
    """Return a hash of the tensors, arrays, numbers and texts in ``batch``.

    Args:
        others: returns the bytes of other objects; None: they do not count.
    """
    content = xxhash.xxh3_64()
    below = [batch]
    while below:
        value = below.pop()
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().flatten().view(torch.uint8).numpy()
        if isinstance(value, np.ndarray):
            content.update(value.tobytes())
        elif isinstance(value, dict):
            below += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            below += value
        elif isinstance(value, str | bytes | int | float):
            content.update(repr(value).encode())
        elif others is not None:
            content.update(others(value))
    return content.hexdigest()
