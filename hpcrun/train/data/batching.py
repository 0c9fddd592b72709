"""Divide the samples of a step, the config's global batch, among ranks and micro-batches.

A library's random permutation may change with the library's version, and starting in the middle requires the
whole permutation. The permutation here can be computed for any single index: a Feistel network over the
smallest even power of two that holds the dataset, iterated until the result is in range (J. Black,
P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). It is not for cryptography.

With a mixture, the sample at a global position is a pure function of (seed, position) too (invariant 5). Each
block of 4096 consecutive positions has the same number of samples of each dataset, in an order that the seed
and the number of the block determine. Each dataset is read in separate passes; two may overlap in a block.
"""

import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.ranks.signals import ignore_in_helper_process

Indices = npt.NDArray[np.int64]

_ROUNDS = 6
_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


def samples(positions: Indices, dataset_size: int, seed: int) -> Indices:
    """Return the dataset indices at global ``positions``, counted over all epochs from the start of training.

    Args:
        positions: shape (n,), non-negative.
        dataset_size: number of samples in an epoch; each epoch visits each sample exactly once.

    Returns:
        Shape (n,), each in ``[0, dataset_size)``.

    Raises:
        ValueError: the dataset is empty.
    """
    if dataset_size < 1:
        raise ValueError("a dataset without samples has no order")
    epochs, within = np.divmod(positions.astype(np.int64), dataset_size)
    result = np.empty_like(within)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        result[chosen] = _permute(within[chosen], dataset_size, seed, int(epoch))
    return result


def divide(span: range, rank: int, world_size: int, accumulation: int) -> list[Indices]:
    """Return the part of ``span`` for ``rank``, one array per micro-batch.

    The sizes of micro-batches differ by at most one; with too few positions some are empty.
    """
    share, over = divmod(len(span), world_size * accumulation)
    parts = []
    for micro in range(accumulation):
        part = micro * world_size + rank
        first = span.start + part * share + min(part, over)
        parts.append(first + np.arange(share + (part < over), dtype=np.int64))
    return parts


def _permute(within: Indices, size: int, seed: int, epoch: int) -> Indices:
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    values = within.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys)
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], half: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    low_bits = np.uint64((1 << half) - 1)
    left, right = values >> np.uint64(half), values & low_bits
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & low_bits)
    joined: npt.NDArray[np.uint64] = (left << np.uint64(half)) | right
    return joined


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    # A full mix of each, so that neighboring seeds and epochs are uncorrelated.
    base = _mix(np.array([seed & int(_MASK)], dtype=np.uint64))
    base = _mix(base ^ np.uint64(epoch & int(_MASK)))
    return _mix(base + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014), modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


@dataclass(frozen=True)
class Batching:
    """Division of a step's ``batch_size`` samples among ``ranks`` x ``accumulation`` micro-batches.

    The sizes differ by at most one sample. A batch may span two epochs. ``epoch``: samples in an epoch; None
    for a stream.
    """

    batch_size: int
    ranks: int
    accumulation: int = 1
    epoch: int | None = None

    @property
    def micro_batch(self) -> int:
        """Maximum number of samples in a micro-batch."""
        return _ceil(self.batch_size, self.ranks * self.accumulation)

    @property
    def always_even(self) -> bool:
        """True if all micro-batches have the same number of samples."""
        return self.batch_size % (self.ranks * self.accumulation) == 0

    def span(self, step: int) -> range:
        """Return the global positions of a step: consecutive, and independent of the number of ranks."""
        return range(step * self.batch_size, (step + 1) * self.batch_size)

    def samples(self, steps: range) -> int:
        """Return the total number of samples in ``steps``."""
        return len(steps) * self.batch_size

    def positions(self, step: int, rank: int) -> list[Indices]:
        """Return the global positions of each micro-batch of ``rank``.

        A micro-batch without samples gets the step's first sample as padding; :meth:`counts` gives it
        the weight 0.
        """
        span = self.span(step)
        shares = divide(span, rank, self.ranks, self.accumulation)
        padding = np.array([span.start], dtype=np.int64)
        return [share if len(share) else padding for share in shares]

    def counts(self, rank: int) -> list[int]:
        """Return the number of samples in each micro-batch of ``rank``; zero for padding."""
        return [len(it) for it in divide(self.span(0), rank, self.ranks, self.accumulation)]

    def lines(self, steps: int) -> Iterator[str]:
        """Yield lines for the user at the start of a training of ``steps`` steps."""
        parts = self.ranks * self.accumulation
        fewest = self.batch_size // parts
        each = f"{fewest}" if fewest == self.micro_batch else f"{fewest} or {self.micro_batch}"
        parallel = f"{_many(self.ranks, 'rank')} x {_many(self.accumulation, 'micro-batch')}"
        weighted = "" if fewest == self.micro_batch else ", weighted by samples"
        yield f"batch of {self.batch_size}: {parallel} x {each} samples{weighted}"
        if self.epoch is None:
            return
        per_epoch = self.epoch / self.batch_size
        yield f"epoch of {_many(self.epoch, 'sample')}: {_about(per_epoch, 'step')}"
        yield f"{_many(steps, 'step')} in all: {_about(steps / per_epoch, 'epoch')}"


def accumulation_of(config: Config, ranks: int) -> int:
    """Return the micro-batches per step and rank: ``train.accumulation``, or from ``train.micro_batch``.

    With a range of ``job.nodes``, ``train.accumulation`` is that of the largest number of nodes. Fewer ranks
    take more micro-batches, so that no micro-batch has more samples than with the largest number.
    """
    train, most = config.train, config.job.world_size
    if train.micro_batch is not None:
        return accumulation_for(train.batch_size, ranks, train.micro_batch)
    if not config.job.elastic or ranks >= most:
        return train.accumulation
    micro_batch = _ceil(train.batch_size, most * train.accumulation)
    return max(train.accumulation, accumulation_for(train.batch_size, ranks, micro_batch))


def count_line(config: Config, nodes: int, ranks: int) -> str | None:
    """Return how an attempt on ``nodes`` nodes with ``ranks`` ranks differs from the largest number of nodes.

    None without a range of ``job.nodes``.
    """
    if not config.job.elastic:
        return None
    now, planned = (accumulation_of(config, count) for count in (ranks, config.job.world_size))
    instead = "" if now == planned else f" instead of {planned}"
    return (
        f"{nodes} of {config.job.nodes} nodes: accumulation {now}{instead}; batches and the order of samples "
        "do not depend on the number of nodes, the last bits do"
    )


def accumulation_for(batch_size: int, ranks: int, micro_batch: int) -> int:
    """Return the smallest number of micro-batches per rank with at most ``micro_batch`` samples each."""
    return _ceil(_ceil(batch_size, ranks), micro_batch)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _about(number: float, thing: str) -> str:
    """Format a number with its unit: whole numbers as such, else one decimal or two significant digits."""
    if number == int(number):
        return _many(int(number), thing)
    return f"{number:.1f} {thing}s" if number >= 1 else f"{number:.2g} {thing}s"


def _many(number: int, thing: str) -> str:
    ending = "" if number == 1 else "es" if thing.endswith("tch") else "s"
    return f"{number} {thing}{ending}"


_MOST_WORKERS = 8


def start_worker(_worker: int) -> None:
    """Set up a loader process: ignore the signals that ranks handle, and use one thread."""
    ignore_in_helper_process()
    torch.set_num_threads(1)


def reseed(*numbers: int) -> None:
    """Seed the generators of this loader process from ``numbers``: the position of a sample.

    A loader process's default generator depends on when the process was started, which a resume changes.
    """
    mixed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    # Not torch.manual_seed, which also seeds every kind of device; a loader process uses none.
    torch.default_generator.manual_seed(mixed)


def worker_processes(config: Config, environ: Mapping[str, str], default: int | None = None) -> int:
    """Return the number of loader processes per rank.

    It is ``data.workers``, else the task's ``default``, else the rank's cores minus one, at most 8. The cores
    are ``job.cpus_per_task`` or those that Slurm has given the task; if both are unknown there are no loader
    processes. The config takes precedence because it is the same after a restart on another node: random
    numbers in samples depend on whether a loader process reads them.
    """
    wanted = default if config.data.workers is None else config.data.workers
    if wanted is not None:
        return wanted
    given = environ.get("SLURM_CPUS_PER_TASK", "").strip()
    cores = config.job.cpus_per_task or (int(given) if given.isdecimal() else 1)
    return max(0, min(_MOST_WORKERS, cores - 1))


BLOCK = 4096
"""Positions in which every dataset has exactly its share; a share is a multiple of 1/4096."""

_BLOCKS_SEED = 0x5851F42D4C957F2D
_DATASET_SEED = 0x14057B7EF767814F
"""Numbers that separate the permutations of blocks and of datasets; any odd 64-bit numbers do."""


class Mixture(Dataset[Any]):
    """Map-style dataset of the samples of several datasets; training takes them in the ratio of weights.

    In training, each block of 4096 consecutive samples has the same number of samples of each dataset. Index
    i counts through the datasets one after the other. Validation reads the indices, so it weights each
    dataset by its size.

    Attributes:
        datasets: the datasets.
        sizes: number of samples of each dataset.
        counts: number of samples of each dataset in a block of 4096.
    """

    def __init__(self, datasets: Sequence[Dataset[Any]], weights: Sequence[float]) -> None:
        """Check the datasets and divide each block among them.

        Args:
            datasets: map-style datasets with a length.
            weights: one positive number for each dataset; only their ratio matters.

        Raises:
            UserError: a dataset is empty, the numbers of weights and datasets differ, or a weight is not
                positive or is below 1/4096 of all weights.
        """
        self.datasets = list(datasets)
        self.sizes = [len(dataset) for dataset in self.datasets]  # type: ignore[arg-type]
        if not all(self.sizes):
            raise UserError(
                f"data: dataset {self.sizes.index(0)} of the mixture has no samples; remove it"
            )
        self.counts = block_counts(weights)
        if len(self.counts) != len(self.datasets):
            raise UserError(
                f"data: {len(self.counts)} weights for {len(self.datasets)} datasets; give one for each"
            )
        self._starts = [0, *accumulate(self.sizes)]

    def __len__(self) -> int:
        """Return the number of samples of all datasets."""
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Raises:
            IndexError: ``index`` is not in ``range(len(self))``.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"no sample {index}: the mixture has {len(self)}, from 0")
        number = bisect_right(self._starts, index) - 1
        return self.datasets[number][index - self._starts[number]]

    def sample_order(self, positions: Indices, seed: int) -> Indices:
        """Return the index of the sample at each global position; a pure function of the arguments.

        Args:
            positions: int64 of shape (n,), counted over all ranks from the start of training.
            seed: the config's ``seed``.

        Returns:
            int64 of shape (n,), each in ``range(len(self))``.
        """
        if len(self.datasets) == 1:
            return samples(positions, self.sizes[0], seed)
        numbers, ordinals = divided(positions, self.counts, seed)
        indices = np.empty_like(ordinals)
        for number, (size, start) in enumerate(zip(self.sizes, self._starts, strict=False)):
            mine = numbers == number
            own = (seed + (number + 1) * _DATASET_SEED) % 2**64
            indices[mine] = start + samples(ordinals[mine], size, own)
        return indices

    def shares(self) -> list[float]:
        """Return the fraction of the training samples that each dataset gives, a multiple of 1/4096."""
        return [count / BLOCK for count in self.counts]


def divided(positions: Indices, counts: Sequence[int], seed: int) -> tuple[Indices, Indices]:
    """Return for each global position the number of its dataset, and which sample of that dataset it is.

    The second number counts the dataset's samples from the start of training, over all passes.
    """
    starts = np.array([0, *accumulate(counts)], dtype=np.int64)
    within = samples(positions, BLOCK, seed ^ _BLOCKS_SEED)
    numbers = np.searchsorted(starts, within, side="right") - 1
    per_block = np.array(counts, dtype=np.int64)[numbers]
    return numbers, positions // BLOCK * per_block + within - starts[numbers]


def block_counts(weights: Sequence[float]) -> list[int]:
    """Return the samples of each dataset in a block: the weights' shares, rounded by largest remainder.

    Raises:
        UserError: a weight is not a positive number, or its share is below 1/4096.
    """
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise UserError(f"data: the weights {list(weights)} of a mixture must be positive numbers")
    exact = [weight * BLOCK / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: counts[number] - exact[number])
    for number in by_remainder[: BLOCK - sum(counts)]:
        counts[number] += 1
    if not all(counts):
        raise UserError(
            f"data: the weight {weights[counts.index(0)]:g} is less than 1/{BLOCK} of all weights; "
            "raise it, or remove the dataset"
        )
    return counts
