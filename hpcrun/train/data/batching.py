"""Divide the samples of a step, the config's global batch, among ranks and micro-batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hpcrun.config.training import Train
from hpcrun.train.data.order import Indices, divide

Uneven = Literal["across", "drop", "pad", "join"]


_EPOCHS = 2
"""Epochs per step from which a line warns: a wrong train.batch_size makes long steps without output."""


@dataclass(frozen=True)
class Batching:
    """Division of a step's ``batch_size`` samples among ``ranks`` x ``accumulation`` micro-batches.

    The sizes differ by at most one sample. ``epoch``: samples in an epoch; None for a stream, for which
    ``uneven`` has no meaning.
    """

    batch_size: int
    ranks: int
    accumulation: int = 1
    uneven: Uneven = "across"
    epoch: int | None = None

    @property
    def micro_batch(self) -> int:
        """Maximum number of samples in a micro-batch."""
        return _ceil(self.batch_size, self.ranks * self.accumulation)

    @property
    def always_even(self) -> bool:
        """True if all micro-batches of all steps have the same number of samples."""
        divides = self.batch_size % (self.ranks * self.accumulation) == 0
        return divides and (self.uneven in ("across", "drop") or not self._left_over)

    @property
    def steps_per_epoch(self) -> float:
        """Number of steps in an epoch; a fraction for ``across``, without the last batch for ``drop``."""
        if self.epoch is None:
            return float("inf")
        if self.uneven == "across":
            return self.epoch / self.batch_size
        whole = self.epoch // self.batch_size
        return whole + (self.uneven != "drop" and self._left_over > 0)

    def span(self, step: int) -> range:
        """Return the global positions of a step: consecutive, and independent of the number of ranks."""
        if self.uneven == "across" or self.epoch is None:
            return range(step * self.batch_size, (step + 1) * self.batch_size)
        epoch, within = divmod(step, int(self.steps_per_epoch))
        first = epoch * self.epoch + within * self.batch_size
        return range(first, min(first + self.batch_size, (epoch + 1) * self.epoch))

    def samples(self, steps: range) -> int:
        """Return the total number of samples in ``steps``."""
        if self.uneven in ("across", "drop"):
            return len(steps) * self.batch_size
        # Other modes use every sample.
        return self.span(steps.stop).start - self.span(steps.start).start

    def micro_batches(self, step: int) -> int:
        """Return the number of micro-batches per rank at ``step``; an epoch's short last batch has fewer."""
        if self.uneven in ("across", "drop"):
            return self.accumulation
        count = len(self.span(step))
        if count == self.batch_size:
            return self.accumulation
        return _ceil(_ceil(count, self.ranks), self.micro_batch)

    def positions(self, step: int, rank: int) -> list[Indices]:
        """Return the global positions of each micro-batch of ``rank``.

        A micro-batch without samples gets the step's first sample as padding; :meth:`counts` gives it
        the weight 0.
        """
        span = self.span(step)
        shares = divide(span, rank, self.ranks, self.micro_batches(step))
        padding = np.array([span.start], dtype=np.int64)
        return [share if len(share) else padding for share in shares]

    def counts(self, step: int, rank: int) -> list[int]:
        """Return the number of samples in each micro-batch of ``rank``; zero for padding."""
        return [
            len(it) for it in divide(self.span(step), rank, self.ranks, self.micro_batches(step))
        ]

    def weights(self, step: int, rank: int) -> list[int] | None:
        """Return :meth:`counts`, or None if all micro-batches of the step have the same number of samples."""
        if self.always_even:
            return None
        if len(self.span(step)) % (self.ranks * self.micro_batches(step)) == 0:
            return None
        return self.counts(step, rank)

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
        left = f"the last one has {self._left_over} samples, and empty ranks"
        ending = {
            "across": "",
            "drop": f"; the last {self._left_over} are dropped",
            "pad": f"; {left} compute padding of weight 0",
            "join": f"; {left} wait in DDP's Join",
        }[self.uneven if self._left_over else "across"]
        yield f"epoch of {_many(self.epoch, 'sample')}: {_about(self.steps_per_epoch, 'step')}{ending}"
        yield f"{_many(steps, 'step')} in all: {_about(steps / self.steps_per_epoch, 'epoch')}"
        if self.batch_size >= _EPOCHS * self.epoch and self.uneven == "across":
            yield (
                f"each step takes {self.batch_size // self.epoch} epochs (train.batch_size="
                f"{self.batch_size}): logs and stops wait for the end of a step"
            )

    @property
    def _left_over(self) -> int:
        return 0 if self.epoch is None else self.epoch % self.batch_size


def accumulation_of(train: Train, ranks: int) -> int:
    """Return the micro-batches per step and rank: ``train.accumulation``, or from ``train.micro_batch``."""
    if train.micro_batch is None:
        return train.accumulation
    return accumulation_for(train.batch_size, ranks, train.micro_batch)


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
