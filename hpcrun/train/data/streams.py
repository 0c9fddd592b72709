"""Iterable datasets that can say where they are: read by rank, saved after each step, entered again.

A stream is read without end, pass after pass, and a micro-batch is the next so many samples of it, also
across the end of a pass. There are two kinds, told apart by the stream's own ``shards_itself``:

- ``False``: one order, the same in every process that iterates it. A step takes the next ``batch_size``
  samples of it and each rank its share of them, as of a map-style dataset, whatever the numbers of ranks and
  of loader processes; so one state, that after the step's last sample, serves any number of them.
- ``True``: each rank iterates samples of its own, and each of its loader processes a part of these. Every
  one of them has a state, which fits no other number of them.

A loader process reads ahead. Its state therefore travels with the micro-batch that it belongs to, and what
is saved is the state that came with the last one that training has taken.
"""

import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from hpcrun.checkpoint.sharded.rank_file import pack
from hpcrun.checkpoint.state.capture import apply_rank, capture_rank, require_plain
from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.errors import UserError
from hpcrun.train.data.batching import Batching
from hpcrun.train.data.workers import reseed, start_worker

_Item = tuple[Any, "bytes | None", "str | None"]
"""A micro-batch, the reader's state after it, and a refusal in their place."""

_REMEDY = "(docs/checkpointing.md, Streams)"


@dataclass(frozen=True)
class StreamState:
    """Where a stream stands, as it lies in a checkpoint; ``own`` is this rank's part."""

    shared: dict[str, Any]
    own: dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """How many samples go where, who reads them, ``prefetch`` batches ahead each, and what batches them."""

    rank: int
    batching: Batching
    workers: int
    prefetch: int = 2
    collate: Callable[[list[Any]], Any] = default_collate

    @property
    def readers(self) -> int:
        """Processes of a rank that iterate the stream."""
        return max(1, self.workers)


def require_stream(stream: IterableDataset[Any], ranks: int, workers: int) -> None:
    """Check that training can be resumed in ``stream``, before it begins.

    Raises:
        UserError: it lacks the two methods, does not say who shards it where that matters, or its
            state is not plain data.
    """
    name = type(stream).__name__
    lacking = [
        method
        for method in ("state_dict", "load_state_dict")
        if not callable(getattr(stream, method, None))
    ]
    if lacking:
        raise UserError(
            f"data: {name} is a stream without {' and '.join(lacking)}, so that training could not go "
            f"on in it; write state_dict() and load_state_dict(state) {_REMEDY}, or give a map-style dataset"
        )
    if ranks * max(1, workers) > 1 and _declared(stream) is None:
        raise UserError(
            f"data: {name} does not say how {ranks} ranks x {max(1, workers)} loader processes share it; "
            "set its shards_itself to False (all iterate the same samples and are dealt theirs) or to "
            f"True (each iterates its own) {_REMEDY}"
        )
    _plain_state(stream)


class StreamSteps:
    """The micro-batches of this rank for each step of ``steps``; close it to end its loader processes."""

    def __init__(
        self,
        stream: IterableDataset[Any],
        steps: range,
        shape: Shape,
        *,
        seed: int,
        pin_memory: bool,
        saved: StreamState | None,
    ) -> None:
        """``saved``: what :meth:`saved` gave at ``steps.start``, in whatever process; None at step 0.

        Raises:
            UserError: ``saved`` belongs to another kind or number of streams, or is missing.
        """
        self._shape, self._whole = shape, not _declared(stream)
        self._states = _restored(stream, steps.start, shape, self._whole, saved)
        self._done = steps.start
        self._feed = _Feed(stream, steps, shape, self._whole, seed, list(self._states))
        self._steps = self._read(steps, seed, pin_memory)

    @property
    def batching(self) -> Batching:
        """How many samples the micro-batches hold."""
        return self._shape.batching

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        return next(self._steps)

    def close(self) -> None:
        """End the loader processes."""
        self._steps.close()

    def saved(self, done: int) -> StreamState:
        """Where the stream stands after the samples of the first ``done`` steps, which is where reading is.

        Raises:
            ValueError: reading is elsewhere.
        """
        if done != self._done:
            raise ValueError(f"the samples of {self._done} steps were given, not of {done}")
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
            # As bytes: no tensor of it concerns the other ranks, which stand at the same place.
            return StreamState({**shared, "state": pack(states[0])}, {})
        return StreamState(shared, {"states": states})

    def _read(self, steps: range, seed: int, pin_memory: bool) -> Generator[list[Any], None, None]:
        loader: DataLoader[_Item] = DataLoader(
            self._feed,
            batch_size=None,
            num_workers=self._shape.workers,
            prefetch_factor=self._shape.prefetch if self._shape.workers else None,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            worker_init_fn=start_worker if self._shape.workers else None,
            # As for map-style datasets: not a number from the generator that is saved.
            generator=torch.Generator().manual_seed(seed),
        )
        items = iter(loader)
        for _ in range(self._feed.lead):
            next(items)
        number = self._feed.first
        for step in steps:
            batches = []
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
    """What a loader process, or the training process itself, makes of the stream."""

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
        # The loader always begins with its process 0; where each has samples of its own, it must be
        # the turn of the same one as in an undisturbed run.
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
        except UserError as error:  # raised in a loader process it would arrive as a traceback
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
        shares = shape.batching.counts(self._steps.start, shape.rank)  # those of every step
        last = self._steps.stop * len(shares)
        for number in range(self.first - self.lead + worker, last, shape.readers):
            if number < self.first:
                yield None, None, None
                continue
            batch = shape.collate([reader.sample() for _ in range(shares[number % len(shares)])])
            yield batch, self._state(reader), None

    def _state(self, reader: "_Reader") -> bytes | None:
        # Made bytes here and now: the loader sends it later, from a thread, when the stream has gone on.
        return pickle.dumps(reader.state()) if self._shape.workers else None


class _Reader:
    """One iteration of a stream, begun anew whenever it ends; ``given`` counts its samples over all passes.

    Args:
        state: where to begin, as :meth:`state` gave it; None: at the first sample.
        seed: what to seed the generators with before each sample, beside its number; None: not at all.
    """

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
        """Plain data, not a copy; raises UserError if the stream's own state is not plain."""
        if self._samples is None and self._loaded is not None:
            return self._loaded
        own = _plain_state(self._stream)
        return {"given": self.given, "pass": self._pass, "stream": own}

    def sample(self, position: int | None = None) -> Any:
        """The next sample, or the one of number ``position``, which is not behind. Raises UserError."""
        if position is not None:
            self.advance(position)
        while True:
            samples = self._samples or self._begin()
            if self._seed is not None:
                reseed(*self._seed, self.given)
            try:
                found = next(samples)
            except StopIteration:
                self._end()
                continue
            self.given += 1
            if not self._looked_at:
                # A counter may be plain before the first sample and numpy's after it: told at once.
                self._looked_at = bool(self.state())
            return found

    def advance(self, position: int) -> None:
        """Pass over the samples before number ``position``; raises UserError."""
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
                    f"passed over {passed}; return how many it did, at most as many as asked"
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
            # An undisturbed run does neither here, and whatever they draw it has not drawn.
            generators = capture_rank()
            self._stream.load_state_dict(self._loaded["stream"])
            self._samples = iter(self._stream)
            self._loaded = None
            apply_rank(generators)
        return self._samples

    def _end(self) -> None:
        if self.given == self._pass_began:
            raise UserError(
                f"data: {type(self._stream).__name__} gave no sample in a whole pass; check the data "
                "options, and that iterating it again after its end begins a new pass"
            )
        self._pass += 1
        self._pass_began = self.given
        self._samples = None


def _restored(
    stream: IterableDataset[Any], start: int, shape: Shape, whole: bool, saved: StreamState | None
) -> list[bytes | None]:
    """The state of each reader of this rank, pickled; raises UserError."""
    name = type(stream).__name__
    if saved is None or not saved.shared:
        if start:
            raise UserError(
                f"data: {name} is a stream, and the checkpoint of step {start} does not say where it "
                "stood: it was made with another dataset; start a new run"
            )
        return [None] * (1 if whole else shape.readers)
    shared = saved.shared
    if shared["shards_itself"] is whole:
        was = "sharded itself" if whole else "was dealt out"
        raise UserError(
            f"data: {name} {was} when step {start} was saved, and does not now; put its shards_itself back, "
            "or start a new run"
        )
    if whole:
        packed = shared["state"]
        return [pickle.dumps(torch.load(BytesIO(packed), weights_only=True))]
    if shared["ranks"] != shape.batching.ranks or shared["readers"] != shape.readers:
        raise UserError(
            f"data: {name} shards itself, and the checkpoint of step {start} is of {shared['ranks']} ranks "
            f"x {shared['readers']} loader processes, not of {shape.batching.ranks} x {shape.readers}: "
            "nobody could tell which samples are left; start as many again (job.nodes, job.gpus, "
            "data.workers)"
        )
    return [None if state is None else pickle.dumps(state) for state in saved.own["states"]]


def _plain_state(stream: Any) -> Any:
    state = stream.state_dict()
    try:
        require_plain(state, f"data: {type(stream).__name__}.state_dict()")
    except CheckpointError as error:
        raise UserError(str(error)) from error
    return state


def _declared(stream: IterableDataset[Any]) -> bool | None:
    found = getattr(stream, "shards_itself", None)
    return None if found is None else bool(found)


def _as_it_is(item: Any) -> Any:
    return item
