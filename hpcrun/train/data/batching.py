"""How the samples of a step fall to ranks and micro-batches. The global batch is what the config names."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hpcrun.config.training import Train
from hpcrun.train.data.order import Indices, divide

Uneven = Literal["across", "drop", "pad", "join"]


_EPOCHS = 2
"""Epochs in one step from which a line warns: a wrong train.batch_size makes long, silent steps."""


@dataclass(frozen=True)
class Batching:
    """A step's ``batch_size`` samples over ``ranks`` x ``accumulation`` micro-batches.

    Shares differ by one sample at most. ``epoch``: samples in an epoch; None for a stream, which has no
    end that ``uneven`` could speak of.
    """

    batch_size: int
    ranks: int
    accumulation: int = 1
    uneven: Uneven = "across"
    epoch: int | None = None

    @property
    def micro_batch(self) -> int:
        """Most samples that a rank takes at once."""
        return _ceil(self.batch_size, self.ranks * self.accumulation)

    @property
    def always_even(self) -> bool:
        """Whether all micro-batches of all steps hold equally many samples."""
        divides = self.batch_size % (self.ranks * self.accumulation) == 0
        return divides and (self.uneven in ("across", "drop") or not self._left_over)

    @property
    def steps_per_epoch(self) -> float:
        """Steps until each sample was seen once, or would have been but for those dropped."""
        if self.epoch is None:
            return float("inf")
        if self.uneven == "across":
            return self.epoch / self.batch_size
        whole = self.epoch // self.batch_size
        return whole + (self.uneven != "drop" and self._left_over > 0)

    def span(self, step: int) -> range:
        """The global positions of a step: consecutive, whatever the number of ranks."""
        if self.uneven == "across" or self.epoch is None:
            return range(step * self.batch_size, (step + 1) * self.batch_size)
        epoch, within = divmod(step, int(self.steps_per_epoch))
        first = epoch * self.epoch + within * self.batch_size
        return range(first, min(first + self.batch_size, (epoch + 1) * self.epoch))

    def samples(self, steps: range) -> int:
        """How many all of ``steps`` take together."""
        if self.uneven in ("across", "drop"):
            return len(steps) * self.batch_size
        # No sample is left out between them.
        return self.span(steps.stop).start - self.span(steps.start).start

    def micro_batches(self, step: int) -> int:
        """How many each rank takes at ``step``: fewer where an epoch's last batch is short."""
        if self.uneven in ("across", "drop"):
            return self.accumulation
        count = len(self.span(step))
        if count == self.batch_size:
            return self.accumulation
        return _ceil(_ceil(count, self.ranks), self.micro_batch)

    def positions(self, step: int, rank: int) -> list[Indices]:
        """The global positions of each micro-batch of ``rank``.

        Where there is no sample left for one, it takes the step's first sample as a stand-in, which
        :meth:`counts` says is worth nothing.
        """
        span = self.span(step)
        shares = divide(span, rank, self.ranks, self.micro_batches(step))
        stand_in = np.array([span.start], dtype=np.int64)
        return [share if len(share) else stand_in for share in shares]

    def counts(self, step: int, rank: int) -> list[int]:
        """The samples of each micro-batch of ``rank``, zero for a stand-in."""
        return [
            len(it) for it in divide(self.span(step), rank, self.ranks, self.micro_batches(step))
        ]

    def weights(self, step: int, rank: int) -> list[int] | None:
        """As :meth:`counts`, or None where all micro-batches of all ranks hold equally many samples."""
        if self.always_even:
            return None
        if len(self.span(step)) % (self.ranks * self.micro_batches(step)) == 0:
            return None
        return self.counts(step, rank)

    def lines(self, steps: int) -> Iterator[str]:
        """What to tell the user at the start of a training of ``steps`` steps."""
        parts = self.ranks * self.accumulation
        fewest = self.batch_size // parts
        each = f"{fewest}" if fewest == self.micro_batch else f"{fewest} or {self.micro_batch}"
        parallel = f"{_many(self.ranks, 'rank')} x {_many(self.accumulation, 'micro-batch')}"
        weighted = "" if fewest == self.micro_batch else ", weighted by samples"
        yield f"batch of {self.batch_size}: {parallel} x {each} samples{weighted}"
        if self.epoch is None:
            return
        left = f"the last one has {self._left_over} samples, and ranks without"
        what = {
            "across": "",
            "drop": f"; the last {self._left_over} are left out",
            "pad": f"; {left} weigh nothing",
            "join": f"; {left} wait in DDP's Join",
        }[self.uneven if self._left_over else "across"]
        yield f"epoch of {_many(self.epoch, 'sample')}: {_about(self.steps_per_epoch, 'step')}{what}"
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
    """Micro-batches of a step on each rank: the config's number, or what ``train.micro_batch`` asks for."""
    if train.micro_batch is None:
        return train.accumulation
    return accumulation_for(train.batch_size, ranks, train.micro_batch)


def accumulation_for(batch_size: int, ranks: int, micro_batch: int) -> int:
    """The fewest micro-batches on each rank of which none exceeds ``micro_batch`` samples."""
    return _ceil(_ceil(batch_size, ranks), micro_batch)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _about(number: float, thing: str) -> str:
    """With a decimal where it is not whole; in small numbers with two digits that say something."""
    if number == int(number):
        return _many(int(number), thing)
    return f"{number:.1f} {thing}s" if number >= 1 else f"{number:.2g} {thing}s"


def _many(number: int, thing: str) -> str:
    ending = "" if number == 1 else "es" if thing.endswith("tch") else "s"
    return f"{number} {thing}{ending}"
