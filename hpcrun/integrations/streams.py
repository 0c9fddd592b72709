"""Iterable datasets that start in the middle of a pass: by their own state, or by a replay.

A reader is a process that iterates the dataset: each worker process, or the training process.
"""

import io
import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils.data import IterableDataset, get_worker_info

from hpcrun.checkpoint.sharded.rank_file import pack
from hpcrun.errors import UserError
from hpcrun.integrations.random_state import generators_in, mixed, seed_with, set_apart


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


def hash_of(batch: Any) -> str:
    """Return a hash of the tensors, arrays, numbers and texts in ``batch``."""
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
    return content.hexdigest()
