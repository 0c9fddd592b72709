"""A DataLoader that resumes at any batch with the samples, and the random values in them, as undisturbed.

The batches of a pass are a function of the seed and the number of the pass. So the position is enough to
resume, and batches before it are skipped by their indices, without reading samples.
"""

import atexit
import gc
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hpcrun.checkpoint.state.generators import OwnRandomness, fingerprint, mixed
from hpcrun.errors import UserError
from hpcrun.printing import say_aside
from hpcrun.ranks.signals import end_helpers
from hpcrun.train.data.found_generators import generators_in, reseed
from hpcrun.train.data.seeded_datasets import (
    Order,
    Probed,
    Reader,
    SeededDataset,
    SeededStream,
    StreamItem,
    WorkerStart,
    first_of_stream,
    has_state,
    set_epoch,
)

_REMEMBERED = 256
"""Positions before the newest batch that :meth:`ExactLoader.state_dict` can describe."""
_COMPARED, _PROBED = 256, 3
"""Numbers of indices and of samples by which ranks recognize that they read the same data."""


class ExactLoader:
    """Wrapper of a DataLoader, to iterate in its place.

    Each iteration is a pass over the dataset. The first iteration after :meth:`load_state_dict` gives the
    rest of the saved pass, which may be empty. All other attributes are those of the DataLoader.

    Args:
        loader: a ``torch.utils.data.DataLoader``.
        name: different for each loader of the training, so that their random values differ.
        rank: number of this rank; None: as torch.distributed says.

    Attributes:
        loader: the DataLoader.
        epoch: number of the pass, from 0.
        batches: number of batches of this pass that were handed out.
        probes: compute ``order`` and ``samples``, which ranks compare.
        order: hash of the first indices of the sampler in this start; None: not computed.
        samples: hash of some samples, read with seeds that are equal on all ranks, or of the first batch of
            an iterable dataset in this start; None: not computed, or these samples are all equal.

    Raises:
        UserError: the loader cannot be exact; the text has the reason and the remedy.
    """

    def __init__(
        self, loader: "DataLoader[Any]", *, name: str = "loader", rank: int | None = None
    ) -> None:
        _require_exact(loader, name)
        self.loader, self.name = loader, name
        ready = dist.is_available() and dist.is_initialized()
        self._rank = rank if rank is not None else dist.get_rank() if ready else 0
        self._seed = mixed(torch.initial_seed() % 2**63, *name.encode())
        samplers = (loader.sampler, loader.batch_sampler)
        self._generators = generators_in(loader.generator, *samplers)
        self._generator_seeds = [fingerprint(one) for one in self._generators]
        self.epoch, self.batches = 0, 0
        self._begun = self.resumed = self._tried = False
        self.probes = False
        self.order: str | None = None
        self.samples: str | None = None
        self._sampler: Any = (
            loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        )
        self._checks: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self._readers: deque[tuple[int, int, list[Reader]]] = deque(maxlen=_REMEMBERED)
        self._saved: dict[str, Any] = {}
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._wrapped: SeededStream | SeededDataset
        if self._is_stream:
            self._wrapped = SeededStream(
                loader.dataset, loader.collate_fn, loader.batch_size, loader.drop_last
            )
        else:
            self._wrapped = SeededDataset(
                loader.dataset, loader.collate_fn, loader.batch_sampler is not None
            )
        self._inner = self._make()
        if loader.num_workers:
            # multiprocessing sends SIGTERM, which the workers ignore, and waits for persistent workers.
            atexit.register(end_helpers)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def count(self) -> int | None:
        """Return the number of batches in a pass; None: unknown, as for an iterable dataset."""
        if self._is_stream:
            return None
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None

    @property
    def sampler_name(self) -> str:
        """The type of the sampler, or of the user's own batch sampler."""
        usual = type(self._sampler) is BatchSampler
        return type(self.loader.sampler if usual else self._sampler).__name__

    @property
    def replica(self) -> tuple[int, int] | None:
        """The number of replicas and the rank of a ``DistributedSampler``; None without one."""
        for part in _parts(self.loader):
            count, rank = getattr(part, "num_replicas", None), getattr(part, "rank", None)
            if isinstance(count, int) and isinstance(rank, int):
                return count, rank
        return None

    @property
    def whole(self) -> int:
        """Number of samples of the dataset if a pass reads each of them in random order, else 0."""
        sampler: Any = self.loader.sampler
        if type(sampler) is not RandomSampler or sampler.replacement:
            return 0
        size = len(sampler.data_source)
        return size if len(sampler) == size else 0

    def __iter__(self) -> Iterator[Any]:
        """Begin the next pass, or the rest of a saved pass."""
        if self.resumed:
            self.resumed = False
        else:
            self.epoch += self._begun
            self.batches, self._saved = 0, {}
            self._checks.clear()
            self._readers.clear()
        self._begun = True
        if self._inner.generator is not None:
            self._inner.generator.manual_seed(mixed(self._seed, self._rank, self.epoch))
        for part in _parts(self.loader):
            set_epoch(part, self.epoch)
        return self._stream() if self._is_stream else self._map()

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the position: plain data.

        Args:
            batches: number of batches of this pass that training has used; None: all that were handed out.

        Raises:
            ValueError: the position is ahead of the batches, or too far behind.
        """
        used = self.batches if batches is None else batches
        found: dict[str, Any] = {"seed": self._seed, "epoch": self.epoch, "batches": used}
        found |= {"begun": self._begun, "generators": self._generator_seeds}
        if used == self._saved.get("batches"):
            return found | {key: self._saved[key] for key in ("check", "next", "readers")}
        if not used:
            return found | {"check": None, "next": 0, "readers": []}
        check = next((check for number, check in self._checks if number == used), None)
        place = next((place for place in self._readers if place[0] == used), None)
        if check is None and place is None:
            raise ValueError(f"{self.name}: {used} batches, but {self.batches} were handed out")
        following, readers = (0, []) if place is None else place[1:]
        return found | {
            "check": check,
            "next": following,
            "readers": [list(reader) for reader in readers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of :meth:`state_dict`, with the next iteration."""
        self._seed, self.epoch, self.batches = state["seed"], state["epoch"], state["batches"]
        self._saved, self._generator_seeds = dict(state), list(state["generators"])
        self._begun = self.resumed = bool(state["begun"])
        self._checks.clear()
        self._readers.clear()

    def _make(self) -> "DataLoader[Any]":
        """Return a loader of whole batches, with the settings of the user's loader."""
        old = self.loader
        workers = old.num_workers
        return DataLoader(
            self._wrapped,
            batch_size=None,
            sampler=None if self._is_stream else _Orders(self),
            collate_fn=_as_it_is,
            num_workers=workers,
            pin_memory=old.pin_memory,
            timeout=old.timeout,
            worker_init_fn=WorkerStart(old.worker_init_fn) if workers else None,
            multiprocessing_context=old.multiprocessing_context if workers else None,
            prefetch_factor=old.prefetch_factor if workers else None,
            # A worker that stays would not see the start of the next pass of a stream.
            persistent_workers=old.persistent_workers and not self._is_stream,
            generator=torch.Generator(),  # worker seeds, without a draw from the training's generator
        )

    def _map(self) -> Iterator[Any]:
        epoch = self.epoch
        for batch in self._inner:
            if self.epoch != epoch:
                raise RuntimeError(f"{self.name}: a new pass has begun; do not mix two iterators")
            if isinstance(batch, Probed):
                self.samples = batch.content
                continue
            self.batches += 1
            yield batch

    def orders(self) -> Iterator[Order]:
        """Yield the batches to read, from the position on; runs ahead of the batches by the prefetch."""
        epoch, start = self.epoch, self.batches
        if not self._tried:
            # In its first pass, a sampler with a hidden state would still look exact.
            tried = self._places()
            first, again = next(tried, None), next(self._places(), None)
            self._require_same(_as_bytes(first), _as_bytes(again))
            self._tried = True
            if self.probes and first is not None:
                # Equal on all ranks: the seed, and the samples if the sampler draws from all of them.
                yield Order(0, epoch, self._probe(chain([first], tried)), probe=True)
        places, content = self._places(), xxhash.xxh3_64()
        for _ in range(start):
            content.update(_as_bytes(next(places, None)))
        if start:
            self._require_same(content.hexdigest(), self._saved.get("check"))
        for position, indices in enumerate(places, start):
            content.update(_as_bytes(indices))
            self._checks.append((position + 1, content.hexdigest()))
            yield Order(mixed(self._seed, self._rank, epoch, position), epoch, indices)

    def _places(self) -> Iterator[Any]:
        """Yield what the sampler gives in this pass, under separate generators."""
        own = OwnRandomness(self._seed, self.epoch)
        with own.used():
            reseed(self._generators, [mixed(seed, self.epoch) for seed in self._generator_seeds])
            places = iter(self._sampler)
        while True:
            with own.used():
                indices = next(places, _END)
            if indices is _END:
                return
            yield indices

    def _probe(self, places: Iterator[Any]) -> list[Any]:
        """Hash the first indices of a pass; return the indices of a few samples, to compare them."""
        content, count = xxhash.xxh3_64(), 0
        first: list[Any] = []
        for indices in places:
            content.update(_as_bytes(indices))
            several = self.loader.batch_sampler is not None
            if len(first) < _PROBED:
                first += indices if several else [indices]
            count += len(indices) if several else 1
            if count >= _COMPARED:
                break
        self.order = content.hexdigest()
        if type(self.loader.sampler) in (RandomSampler, SequentialSampler) and (
            type(self._sampler) in (RandomSampler, SequentialSampler, BatchSampler)
        ):
            dataset: Any = self.loader.dataset
            last = len(dataset) - 1
            return sorted({0, last // 2, last})
        return first[:_PROBED]

    def _require_same(self, now: Any, before: Any) -> None:
        if now != before:
            raise UserError(
                f"{self.name}: {self.sampler_name} gives other samples when it is iterated again, so a "
                "resume would repeat or skip samples; a sampler must draw from the global generators or "
                "from one in an attribute, or have set_epoch()"
            )

    def _stream(self) -> Iterator[Any]:
        stream = self._wrapped
        assert isinstance(stream, SeededStream)
        count = max(1, self.loader.num_workers)
        readers = [Reader(*one) for one in self._saved.get("readers", [])] or [Reader()] * count
        if len(readers) != count:
            raise UserError(
                f"{self.name}: the checkpoint has {len(readers)} workers of an iterable dataset, and this "
                f"loader has {count}; set num_workers={len(readers)}"
            )
        stream.seed = mixed(self._seed, self._rank, self.epoch)
        stream.starts, stream.first = list(readers), self._saved.get("next", 0)
        if self.batches and not has_state(stream.dataset):
            say_aside(
                f"hpcrun: {self.name}: {type(stream.dataset).__name__} has no state_dict() and "
                f"load_state_dict(), so {self.batches} batches are read again to resume"
            )
        item: StreamItem
        for item in self._inner:
            readers[item.number] = item.reader
            if self.probes and not self._tried:
                self._tried = True
                self.samples = first_of_stream(item.batch)
            self.batches += 1
            self._readers.append((self.batches, (item.number + 1) % count, list(readers)))
            yield item.batch


def next_pass(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a loader at the beginning of the pass after that of ``state``."""
    epoch = state["epoch"] + bool(state["begun"])
    return {
        **state,
        "epoch": epoch,
        "batches": 0,
        "begun": False,
        "check": None,
        "next": 0,
        "readers": [],
    }


class _Orders(Sampler[Order]):
    """Sampler of the orders of a loader."""

    def __init__(self, exact: ExactLoader) -> None:
        # A cycle would keep an old iterator until a garbage collection, which may happen in a new worker.
        self._exact = ref(exact)

    def __iter__(self) -> Iterator[Order]:
        exact = self._exact()
        assert exact is not None
        return exact.orders()


_END = object()


def _as_it_is(batch: Any) -> Any:
    return batch


def _as_bytes(indices: Any) -> bytes:
    array = isinstance(indices, torch.Tensor | np.ndarray)
    return np.asarray(indices).tobytes() if array else repr(indices).encode()


def _parts(loader: Any) -> list[Any]:
    """Return what may have ``set_epoch``: the dataset, and the samplers inside each other."""
    found, level = [loader.dataset], [loader.sampler, loader.batch_sampler]
    while level:
        part = level.pop()
        if part is not None and not any(part is one for one in found):
            found.append(part)
            level += [getattr(part, name, None) for name in ("sampler", "batch_sampler")]
    return found


_OF_FABRIC = (
    "with Fabric, leave this loader out of setup_dataloaders(), and make it with "
    "sampler=DistributedSampler(dataset)"
)
_OF_LIBRARY = {
    "timm": "start timm's train.py with --no-prefetcher (create_loader(use_prefetcher=False))",
    "lightning": _OF_FABRIC,
    "lightning_fabric": _OF_FABRIC,
}


def _require_exact(loader: Any, name: str) -> None:
    if not isinstance(loader, DataLoader):
        library = type(loader).__module__.partition(".")[0]
        remedy = _OF_LIBRARY.get(library) or (
            "pass the DataLoader, or remove loader= if the loop makes its own batches from the global "
            "generators"
        )
        raise UserError(
            f"{name}: is a {type(loader).__name__}, not a torch.utils.data.DataLoader; {remedy}"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UserError(
            f"{name}: {type(loader).__name__} iterates in its own way, which a resume cannot repeat; pass a "
            "plain torch.utils.data.DataLoader"
        )
    if not getattr(loader, "in_order", True):
        raise UserError(
            f"{name}: in_order=False gives batches in the order in which workers end; remove it"
        )
    if isinstance(loader.dataset, IterDataPipe):
        raise UserError(
            f"{name}: {type(loader.dataset).__name__} is a DataPipe, and its position cannot be saved; use a "
            "map-style dataset, or an IterableDataset"
        )


def require_own_generators() -> None:
    """Raise UserError for a loader, such as that of a validation, that draws only in its first pass.

    The seed of its workers comes from the generator of the training, once in each start.
    """
    # Also the loaders of an earlier training in this process.
    known = {id(vars(exact).get("loader")) for exact in _alive(ExactLoader)}
    for loader in _alive(DataLoader):
        if loader.persistent_workers and loader.generator is None and id(loader) not in known:
            raise UserError(
                f"DataLoader of a {type(loader.dataset).__name__} with persistent_workers=True: its first "
                "pass of each start draws a random number, which changes the training after a resume; give "
                "it generator=torch.Generator(), or if the training iterates it, pass it in loader="
            )


class UnknownLoaders:
    """Search, in the first two steps of a start, for loaders that a checkpoint has no position of."""

    def __init__(self) -> None:
        self._before: WeakKeyDictionary[Any, int] | None = None
        self._done = False

    def step(self) -> None:
        """Note the batches of all loaders so far, or in the second step compare; later do nothing.

        Raises:
            UserError: a loader has given batches between the two steps, in a pass that began before.
        """
        if self._done:
            return
        if self._before is None:
            ours = (SeededDataset, SeededStream)
            running = _alive(_BaseDataLoaderIter)
            self._before = WeakKeyDictionary(
                {one: one._num_yielded for one in running if not isinstance(one._dataset, ours)}
            )
            return
        self._done = True
        for one, count in self._before.items():
            if one._num_yielded > count:
                raise UserError(
                    f"state.step(): the loop iterates a DataLoader of a {type(one._dataset).__name__} that "
                    "hpcrun.resumable() was not given, so a resume would repeat samples; pass it in loader=, "
                    "and iterate state.batches(loader)"
                )


def _alive(kind: type) -> Iterator[Any]:
    # isinstance() would read the attribute __class__ of any object of the program.
    return (one for one in gc.get_objects() if issubclass(type(one), kind))
