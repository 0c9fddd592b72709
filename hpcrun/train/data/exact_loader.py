"""A DataLoader that resumes at any batch with the samples, and the random values in them, as undisturbed.

The batches of a pass are a function of the seed and the number of the pass. So the position is enough to
resume, and batches before it are skipped by their indices, without reading samples.
"""

import atexit
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from hpcrun.checkpoint.state.generators import mixed
from hpcrun.errors import UserError
from hpcrun.printing import say_aside
from hpcrun.ranks.signals import end_helpers
from hpcrun.train.data.loader_checks import require_exact
from hpcrun.train.data.positioned import PositionedLoader, Settings
from hpcrun.train.data.readers import BatchSeeded, Probed, set_epoch
from hpcrun.train.data.sample_hash import first_of_stream
from hpcrun.train.data.sampler_order import REMEMBERED, SamplerOrder
from hpcrun.train.data.seeded_stream import Reader, SeededStream, StreamItem, has_state


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
        samples: hash of some samples, read with seeds that are equal on all ranks, or of the first batch of
            an iterable dataset in this start; None: not computed, or these samples are all equal.

    Raises:
        UserError: the loader cannot be exact; the text has the reason and the remedy.
    """

    def __init__(
        self, loader: "DataLoader[Any]", *, name: str = "loader", rank: int | None = None
    ) -> None:
        require_exact(loader, name)
        self.loader, self.name = loader, name
        ready = dist.is_available() and dist.is_initialized()
        self._rank = rank if rank is not None else dist.get_rank() if ready else 0
        seed = mixed(torch.initial_seed() % 2**63, *name.encode())
        self._order = SamplerOrder(loader, name, seed, self._rank)
        self.epoch, self.batches = 0, 0
        self._begun = self.resumed = self._tried = False
        self.probes = False
        self.samples: str | None = None
        self._readers: deque[tuple[int, int, list[Reader]]] = deque(maxlen=REMEMBERED)
        self._saved: dict[str, Any] = {}
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._source: SeededStream | BatchSeeded
        if self._is_stream:
            self._source = SeededStream(
                loader.dataset, loader.collate_fn, loader.batch_size, loader.drop_last
            )
        else:
            self._source = BatchSeeded(
                loader.dataset, loader.collate_fn, batched=loader.batch_sampler is not None
            )
        settings = Settings(
            workers=loader.num_workers,
            prefetch=loader.prefetch_factor,
            pin_memory=loader.pin_memory,
            persistent=loader.persistent_workers,
            timeout=loader.timeout,
            context=loader.multiprocessing_context,
            start=loader.worker_init_fn,
        )
        self._inner = PositionedLoader(
            self._source, None if self._is_stream else self._order, settings
        )
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
    def order(self) -> str | None:
        """Hash of the first indices of the sampler in this start; None: not computed."""
        return self._order.digest

    @property
    def sampler_name(self) -> str:
        """The type of the sampler, or of the user's own batch sampler."""
        return self._order.name

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
        return self._order.whole

    def __iter__(self) -> Iterator[Any]:
        """Begin the next pass, or the rest of a saved pass."""
        if self.resumed:
            self.resumed = False
        else:
            self.epoch += self._begun
            self.batches, self._saved = 0, {}
            self._readers.clear()
        self._begun = True
        self._inner.seed(mixed(self._order.seed, self._rank, self.epoch))
        for part in _parts(self.loader):
            set_epoch(part, self.epoch)
        if self._is_stream:
            return self._stream()
        check = self._saved.get("check")
        self._order.begin(self.epoch, self.batches, check, probes=self.probes)
        return self._map()

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the position: plain data.

        Args:
            batches: number of batches of this pass that training has used; None: all that were handed out.

        Raises:
            ValueError: the position is ahead of the batches, or too far behind.
        """
        used = self.batches if batches is None else batches
        found: dict[str, Any] = {"seed": self._order.seed, "epoch": self.epoch, "batches": used}
        found |= {"begun": self._begun, "generators": self._order.generator_seeds}
        if used == self._saved.get("batches"):
            return found | {key: self._saved[key] for key in ("check", "next", "readers")}
        if not used:
            return found | {"check": None, "next": 0, "readers": []}
        check = self._order.check(used)
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
        self._order.seed, self._order.generator_seeds = state["seed"], list(state["generators"])
        self.epoch, self.batches, self._saved = state["epoch"], state["batches"], dict(state)
        self._begun = self.resumed = bool(state["begun"])
        self._order.begin(self.epoch, self.batches, None, probes=False)
        self._readers.clear()

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

    def _stream(self) -> Iterator[Any]:
        stream = self._source
        assert isinstance(stream, SeededStream)
        count = max(1, self.loader.num_workers)
        readers = [Reader(*one) for one in self._saved.get("readers", [])] or [Reader()] * count
        if len(readers) != count:
            raise UserError(
                f"{self.name}: the checkpoint has {len(readers)} workers of an iterable dataset, and this "
                f"loader has {count}; set num_workers={len(readers)}"
            )
        stream.seed = mixed(self._order.seed, self._rank, self.epoch)
        stream.starts, stream.lead = list(readers), self._saved.get("next", 0)
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


def _parts(loader: Any) -> list[Any]:
    """Return what may have ``set_epoch``: the dataset, and the samplers inside each other."""
    found, level = [loader.dataset], [loader.sampler, loader.batch_sampler]
    while level:
        part = level.pop()
        if part is not None and not any(part is one for one in found):
            found.append(part)
            level += [getattr(part, name, None) for name in ("sampler", "batch_sampler")]
    return found
