"""The order of a user's sampler, which a resume continues in the middle of a pass."""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from hpcrun.checkpoint.state.generators import OwnRandomness, fingerprint, mixed
from hpcrun.errors import UserError
from hpcrun.train.data.found_generators import generators_in, reseed
from hpcrun.train.data.readers import Read

REMEMBERED = 256
"""Positions before the newest batch whose hash is known."""
_COMPARED, _PROBED = 256, 3
"""Numbers of indices and of samples by which ranks recognize that they read the same data."""


class SamplerOrder(Sampler[Read]):
    """Sampler of what to read in a pass, from a position on.

    The user's sampler runs under generators of its own, which the seed and the pass decide, so each iteration
    of a pass is the same. Batches before the position are skipped by their indices, without reading samples.

    Args:
        loader: the user's loader.
        name: of the loader, for messages.
        seed: of the loader.
        rank: number of this rank.

    Attributes:
        seed: the argument; a resume sets that of the checkpoint.
        generator_seeds: seeds of the user's generators in the sampler; as ``seed``.
        digest: hash of the first indices in this start; None: not computed.
    """

    def __init__(self, loader: "DataLoader[Any]", name: str, seed: int, rank: int) -> None:
        self._loader, self._name, self._rank = loader, name, rank
        self._sampler: Any = (
            loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        )
        samplers = (loader.sampler, loader.batch_sampler)
        self._generators = generators_in(loader.generator, *samplers)
        self.seed = seed
        self.generator_seeds = [fingerprint(one) for one in self._generators]
        self.digest: str | None = None
        self._tried = self._probes = False
        self._epoch = self._start = 0
        self._check: Any = None
        self._checks: deque[tuple[int, str]] = deque(maxlen=REMEMBERED)

    @property
    def name(self) -> str:
        """The type of the sampler, or of the user's own batch sampler."""
        usual = type(self._sampler) is BatchSampler
        return type(self._loader.sampler if usual else self._sampler).__name__

    @property
    def whole(self) -> int:
        """Number of samples of the dataset if a pass reads each of them in random order, else 0."""
        sampler: Any = self._loader.sampler
        if type(sampler) is not RandomSampler or sampler.replacement:
            return 0
        size = len(sampler.data_source)
        return size if len(sampler) == size else 0

    def begin(self, epoch: int, start: int, check: Any, *, probes: bool) -> None:
        """Set what the next iteration yields.

        Args:
            epoch: number of the pass.
            start: number of batches to skip.
            check: hash of the skipped batches, which must be the same; see :meth:`check`.
            probes: compute ``digest``, and read some samples first, which ranks compare.
        """
        self._epoch, self._start, self._check, self._probes = epoch, start, check, probes
        self._checks.clear()

    def check(self, batches: int) -> str | None:
        """Return the hash of the first batches of the pass; None: they are too many or too far behind."""
        return next((check for number, check in self._checks if number == batches), None)

    def __iter__(self) -> Iterator[Read]:
        """Yield the batches to read, from the position on; runs ahead of the batches by the prefetch."""
        epoch, start = self._epoch, self._start
        if not self._tried:
            # In its first pass, a sampler with a hidden state would still look exact.
            tried = self._places()
            first, again = next(tried, None), next(self._places(), None)
            self._require_same(_as_bytes(first), _as_bytes(again))
            self._tried = True
            if self._probes and first is not None:
                # Equal on all ranks: the seed, and the samples if the sampler draws from all of them.
                yield Read(0, epoch, self._probe(chain([first], tried)), probe=True)
        places, content = self._places(), xxhash.xxh3_64()
        for _ in range(start):
            content.update(_as_bytes(next(places, None)))
        if start:
            self._require_same(content.hexdigest(), self._check)
        for position, indices in enumerate(places, start):
            content.update(_as_bytes(indices))
            self._checks.append((position + 1, content.hexdigest()))
            yield Read(mixed(self.seed, self._rank, epoch, position), epoch, indices)

    def _places(self) -> Iterator[Any]:
        """Yield what the sampler gives in this pass, under separate generators."""
        own = OwnRandomness(self.seed, self._epoch)
        with own.used():
            reseed(self._generators, [mixed(seed, self._epoch) for seed in self.generator_seeds])
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
        several = self._loader.batch_sampler is not None
        for indices in places:
            content.update(_as_bytes(indices))
            if len(first) < _PROBED:
                first += indices if several else [indices]
            count += len(indices) if several else 1
            if count >= _COMPARED:
                break
        self.digest = content.hexdigest()
        if type(self._loader.sampler) in (RandomSampler, SequentialSampler) and (
            type(self._sampler) in (RandomSampler, SequentialSampler, BatchSampler)
        ):
            dataset: Any = self._loader.dataset
            last = len(dataset) - 1
            return sorted({0, last // 2, last})
        return first[:_PROBED]

    def _require_same(self, now: Any, before: Any) -> None:
        if now != before:
            raise UserError(
                f"{self._name}: {self.name} gives other samples when it is iterated again, so a "
                "resume would repeat or skip samples; a sampler must draw from the global generators or "
                "from one in an attribute, or have set_epoch()"
            )


_END = object()


def _as_bytes(indices: Any) -> bytes:
    array = isinstance(indices, torch.Tensor | np.ndarray)
    return np.asarray(indices).tobytes() if array else repr(indices).encode()
