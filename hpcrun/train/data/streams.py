"""Streams: resumable iterable datasets, read on each rank and saved after each step.

A stream is read without end, pass after pass. A micro-batch is the next samples of the stream, also across
the end of a pass. The stream's attribute ``shards_itself`` selects one of two kinds:

- ``False``: one order, the same in every process that iterates the stream. A step takes the next
  ``batch_size`` samples, and each rank gets its part of them, as with a map-style dataset, for any number of
  ranks and loader processes. One state, after the step's last sample, therefore fits any number of processes.
- ``True``: each rank iterates its own samples, and each of its loader processes a part of them. Every loader
  process has its own state, so a resume needs the same numbers of ranks and loader processes.

A loader process reads ahead. It therefore sends its state with each micro-batch, and a checkpoint holds the
state that came with the last micro-batch that training has used.
"""

import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from hpcrun.checkpoint.sharded.rank_file import pack
from hpcrun.checkpoint.state.capture import plain
from hpcrun.checkpoint.state.generators import kept_generators, seed_at
from hpcrun.errors import UserError
from hpcrun.storage.errors import CheckpointError
from hpcrun.train.data.batching import Batching, start_worker
from hpcrun.train.data.micro_batches import MicroBatches

_Item = tuple[Any, "bytes | None", "str | None"]
"""(micro-batch, pickled state of the reader after it, or an error message instead of both)."""


@dataclass(frozen=True)
class StreamState:
    """Position of a stream in a checkpoint: ``shared`` by all ranks, and ``own`` of this rank."""

    shared: dict[str, Any]
    own: dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Division of a stream's samples: rank, batches, loader processes with ``prefetch``, collate function."""

    rank: int
    batching: Batching
    workers: int
    prefetch: int = 2
    collate: Callable[[list[Any]], Any] = default_collate

    @property
    def readers(self) -> int:
        """Number of processes of a rank that iterate the stream."""
        return max(1, self.workers)


def require_stream(stream: IterableDataset[Any], ranks: int, workers: int) -> None:
    """Check before training that it can resume in ``stream``.

    Raises:
        UserError: the stream lacks ``state_dict`` or ``load_state_dict``, does not set ``shards_itself``
            although several processes read it, or its state is not plain data.
    """
    name = type(stream).__name__
    lacking = [
        method
        for method in ("state_dict", "load_state_dict")
        if not callable(getattr(stream, method, None))
    ]
    if lacking:
        raise UserError(
            f"data: {name} is a stream without {' and '.join(lacking)}, so training could not resume in it; "
            "write state_dict() and load_state_dict(state), or give a map-style dataset"
        )
    require_exact(stream, workers)
    if ranks * max(1, workers) > 1 and _declared(stream) is None:
        raise UserError(
            f"data: {name} does not say how {ranks} ranks x {max(1, workers)} loader processes divide it; "
            "set its shards_itself to False (all iterate the same samples, and hpcrun divides them) or to "
            "True (each iterates its own samples)"
        )
    _plain_state(stream)


class StreamSteps:
    """Micro-batches of this rank for each step of ``steps``."""

    def __init__(
        self,
        stream: IterableDataset[Any],
        steps: range,
        shape: Shape,
        seed: int,
        saved: StreamState | None,
    ) -> None:
        """``saved``: what :meth:`saved` returned at ``steps.start``, in any process; None at step 0.

        Raises:
            UserError: ``saved`` is missing, or does not fit the kind of stream or the number of readers.
        """
        self._shape, self._whole = shape, not _declared(stream)
        self._states = _restored(stream, steps.start, shape, self._whole, saved)
        self._done = steps.start
        self._feed = _Feed(stream, steps, shape, self._whole, seed, list(self._states))
        self._steps, self._seed = steps, seed

    def saved(self, done: int) -> StreamState:
        """Return the position of the stream after the first ``done`` steps, which must be the current ones.

        Raises:
            ValueError: another number of steps has been read.
        """
        if done != self._done:
            raise ValueError(f"{self._done} steps have been read, not {done}")
        shape = self._shape
        states = [None if state is None else pickle.loads(state) for state in self._states]
        if not shape.workers and self._feed.reader is not None:
            states = [self._feed.reader.state()]
        shared: dict[str, Any] = {
            "shards_itself": not self._whole,
            "ranks": shape.batching.ranks,
            "readers": shape.readers,
        }
        if self._whole:
            # As bytes: all ranks have the same position, so no tensor in it needs to be compared or sharded.
            return StreamState({**shared, "state": pack(states[0])}, {})
        return StreamState(shared, {"states": states})

    def read(self, *, pin_memory: bool) -> Generator[MicroBatches, None, None]:
        """Yield the micro-batches of each step; close the generator to end the loader processes."""
        loader: DataLoader[_Item] = DataLoader(
            self._feed,
            batch_size=None,
            num_workers=self._shape.workers,
            prefetch_factor=self._shape.prefetch if self._shape.workers else None,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            worker_init_fn=start_worker if self._shape.workers else None,
            # An own generator: the loader must not draw from the global generator, which is saved.
            generator=torch.Generator().manual_seed(self._seed),
        )
        items = iter(loader)
        for _ in range(self._feed.lead):
            next(items)
        number = self._feed.first
        for step in self._steps:
            batches = MicroBatches()
            for _ in range(self._shape.batching.accumulation):
                batch, state, refusal = next(items)
                if refusal is not None:
                    raise UserError(refusal)
                batches.append(batch)
                if state is not None:
                    self._states[0 if self._whole else number % self._shape.readers] = state
                number += 1
            self._done = step + 1
            yield batches


class _Feed(IterableDataset[_Item]):
    """Dataset that the loader iterates, in a loader process or in the training process."""

    def __init__(
        self,
        stream: IterableDataset[Any],
        steps: range,
        shape: Shape,
        whole: bool,
        seed: int,
        states: Sequence[bytes | None],
    ) -> None:
        self._stream, self._steps, self._shape = stream, steps, shape
        self._whole, self._seed, self._states = whole, seed, states
        self.reader: _Reader | None = None
        self.first = steps.start * shape.batching.accumulation
        # The loader always starts with its process 0. If each process has its own samples, the next process
        # must be the same as in an uninterrupted run: ``lead`` empty items come first.
        self.lead = 0 if whole else self.first % shape.readers

    def __iter__(self) -> Iterator[_Item]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        place = () if self._whole else (self._shape.rank, worker)
        state = self._states[0 if self._whole else worker]
        loaded = None if state is None else pickle.loads(state)
        seed = None if info is None else (self._seed, *place)
        self.reader = _Reader(self._stream, loaded, seed)
        try:
            yield from (
                self._dealt(self.reader, worker) if self._whole else self._part(self.reader, worker)
            )
        except UserError as error:  # Raised in a loader process, it would arrive as a traceback.
            yield None, None, str(error)

    def _dealt(self, reader: "_Reader", worker: int) -> Iterator[_Item]:
        shape = self._shape
        number = 0
        for step in self._steps:
            shares = shape.batching.positions(step, shape.rank)
            for positions in shares:
                number += 1
                if (number - 1) % shape.readers != worker:
                    continue
                batch = shape.collate([reader.sample(int(position)) for position in positions])
                state = None
                if positions is shares[-1]:
                    reader.advance((step + 1) * shape.batching.batch_size)
                    state = self._state(reader)
                yield batch, state, None

    def _part(self, reader: "_Reader", worker: int) -> Iterator[_Item]:
        shape = self._shape
        shares = shape.batching.counts(shape.rank)
        last = self._steps.stop * len(shares)
        for number in range(self.first - self.lead + worker, last, shape.readers):
            if number < self.first:
                yield None, None, None
                continue
            batch = shape.collate([reader.sample() for _ in range(shares[number % len(shares)])])
            yield batch, self._state(reader), None

    def _state(self, reader: "_Reader") -> bytes | None:
        # Pickled immediately: the loader sends the item later from a thread, when the stream has advanced.
        return pickle.dumps(reader.state()) if self._shape.workers else None


class _Reader:
    """Endless iteration of a stream; ``given`` counts its samples over all passes."""

    def __init__(
        self,
        stream: IterableDataset[Any],
        state: dict[str, Any] | None,
        seed: tuple[int, ...] | None,
    ) -> None:
        self._stream: Any = stream
        self._seed = seed
        self._samples: Iterator[Any] | None = None
        self._loaded = state
        self._looked_at = False
        self.given = 0 if state is None else int(state["given"])
        self._pass = 0 if state is None else int(state["pass"])
        self._pass_began = -1 if state is not None and self.given else self.given

    def state(self) -> dict[str, Any]:
        """Return the position as plain data, not a copy; raises UserError if it is not plain."""
        if self._samples is None and self._loaded is not None:
            return self._loaded
        own = _plain_state(self._stream)
        return {"given": self.given, "pass": self._pass, "stream": own}

    def sample(self, position: int | None = None) -> Any:
        """Return the next sample, or sample number ``position``, which must be ahead. Raises UserError."""
        if position is not None:
            self.advance(position)
        while True:
            samples = self._samples or self._begin()
            if self._seed is not None:
                seed_at(*self._seed, self.given)
            try:
                found = next(samples)
            except StopIteration:
                self._end()
                continue
            self.given += 1
            if not self._looked_at:
                # A counter may become a numpy number with the first sample: check it now, not in a save.
                self._looked_at = bool(self.state())
            return found

    def advance(self, position: int) -> None:
        """Skip the samples before number ``position``; raises UserError."""
        skip = getattr(self._stream, "skip_samples", None)
        while self.given < position:
            if skip is None:
                self.sample()
                continue
            if self._samples is None:
                self._begin()
            passed = int(skip(position - self.given))
            if not 0 <= passed <= position - self.given:
                raise UserError(
                    f"data: {type(self._stream).__name__}.skip_samples({position - self.given}) says that it "
                    f"skipped {passed}; return the number of skipped samples, at most the requested number"
                )
            self.given += passed
            if self.given < position:
                self._end()

    def _begin(self) -> Iterator[Any]:
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(self._pass)
        if self._loaded is None:
            self._samples = iter(self._stream)
        else:
            # An uninterrupted run makes neither call here, so what they draw must not change the generators.
            with kept_generators():
                self._stream.load_state_dict(self._loaded["stream"])
                self._samples = iter(self._stream)
            self._loaded = None
        return self._samples

    def _end(self) -> None:
        if self.given == self._pass_began:
            raise UserError(
                f"data: {type(self._stream).__name__} gave no sample in a whole pass; check the data "
                "options, and that iterating the dataset again starts a new pass"
            )
        self._pass += 1
        self._pass_began = self.given
        self._samples = None


def _restored(
    stream: IterableDataset[Any], start: int, shape: Shape, whole: bool, saved: StreamState | None
) -> list[bytes | None]:
    """Return the pickled state of each reader of this rank; raises UserError."""
    name = type(stream).__name__
    if saved is None or not saved.shared:
        if start:
            raise UserError(
                f"data: {name} is a stream, but the checkpoint of step {start} has no position in it, since "
                "it was made with another dataset; start a new run"
            )
        return [None] * (1 if whole else shape.readers)
    shared = saved.shared
    if shared["shards_itself"] is whole:
        was, now = (True, False) if whole else (False, True)
        raise UserError(
            f"data: {name}.shards_itself was {was} when step {start} was saved, and is {now} now; change it "
            "back, or start a new run"
        )
    if whole:
        packed = shared["state"]
        return [pickle.dumps(torch.load(BytesIO(packed), weights_only=True))]
    if shared["ranks"] != shape.batching.ranks or shared["readers"] != shape.readers:
        raise UserError(
            f"data: {name} shards itself, and the checkpoint of step {start} has {shared['ranks']} ranks x "
            f"{shared['readers']} loader processes, not {shape.batching.ranks} x {shape.readers}; start the "
            "same numbers as before, since other numbers cannot divide the remaining samples (job.nodes, "
            "job.gpus, data.workers)"
        )
    return [None if state is None else pickle.dumps(state) for state in saved.own["states"]]


def _plain_state(stream: Any) -> Any:
    try:
        return plain(stream.state_dict(), f"data: {type(stream).__name__}.state_dict()")
    except CheckpointError as error:
        raise UserError(str(error)) from error
    except TypeError as error:
        # Mosaic's StreamingDataset needs counts of its loader. Other errors come from inside the method.
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise
        raise UserError(
            f"data: {error}; write it without arguments, or give samples by index, in a map-style dataset"
        ) from error


def _declared(stream: IterableDataset[Any]) -> bool | None:
    found = getattr(stream, "shards_itself", None)
    return None if found is None else bool(found)


def _as_it_is(item: Any) -> Any:
    return item


_BUFFERED = "BufferShuffled"


def require_exact(stream: Any, workers: int) -> None:
    """Check what is known of ``datasets`` (Hugging Face).

    Raises:
        UserError: a resume in ``stream`` would repeat or skip samples.
    """
    name = type(stream).__name__
    if type(stream).__module__.partition(".")[0] != "datasets":
        return
    if workers:
        # Observed in datasets 5.2: each process reads some of the shards, and the processes share one epoch.
        # The first process to begin a new pass makes the others ignore the state that they load.
        raise UserError(
            f"data.workers: {workers} processes of a {name} of the package datasets do not resume where they "
            "stopped; set data.workers=0, or give the map-style datasets.Dataset"
        )
    if _buffers(getattr(stream, "_ex_iterable", None)):
        raise UserError(
            f"data: the state of {name}.shuffle() lacks the samples in its buffer, so a resume would leave "
            "them out; remove it, or give the map-style datasets.Dataset, which hpcrun shuffles"
        )


def _buffers(part: Any) -> bool:
    """Return True if ``part`` of a pipeline, or one that it reads, shuffles in a buffer."""
    if isinstance(part, list | tuple):
        return any(map(_buffers, part))
    if type(part).__module__.partition(".")[0] != "datasets":
        return False
    inner = (getattr(part, key, None) for key in ("ex_iterable", "ex_iterables"))
    return type(part).__name__.startswith(_BUFFERED) or any(map(_buffers, inner))
