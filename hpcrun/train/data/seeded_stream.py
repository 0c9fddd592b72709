"""Iterable datasets of a user's loop: each batch is read under generators that its position seeds.

A pass starts in the middle by the dataset's own state, or by a replay. Its readers are the processes that
iterate it: each worker process, or the training process.
"""

import io
import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch

from hpcrun.checkpoint.sharded.rank_file import pack
from hpcrun.checkpoint.state.generators import mixed, set_apart
from hpcrun.errors import UserError
from hpcrun.train.data.found_generators import generators_in, seed_with
from hpcrun.train.data.positioned import LedStream
from hpcrun.train.data.sample_hash import hash_of


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


class SeededStream(LedStream):
    """Iterable dataset of collated batches, which can start in the middle of a pass.

    Args:
        dataset: the user's dataset.
        collate: the collate function of the user's loader.
        size: samples in a batch; None: an item of the dataset is a batch.
        drop_last: omit a last batch with fewer samples.

    Attributes:
        seed: seed of the pass.
        starts: position of each reader; empty at the beginning of a pass.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], size: int | None, drop_last: bool
    ) -> None:
        self.dataset, self._collate, self._size, self._drop_last = dataset, collate, size, drop_last
        self.seed = 0
        self.starts: list[Reader] = []
        self._with_state = has_state(dataset)

    def items(self, number: int) -> Iterator[StreamItem]:
        """Yield the batches of the reader with this number."""
        items = self._read(number)
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
