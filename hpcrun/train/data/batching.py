"""Divide the samples of a step, the config's global batch, among ranks and micro-batches.

A library's random permutation may change with the library's version, and starting in the middle requires the
whole permutation. The permutation here can be computed for any single index: a Feistel network over the
smallest even power of two that holds the dataset, iterated until the result is in range (J. Black,
P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). It is not for cryptography.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hpcrun.config import Config
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
