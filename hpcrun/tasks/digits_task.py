"""What the tasks on handwritten digits share: where their images come from, and how they are parted."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from hpcrun.tasks import digits
from hpcrun.tasks.options import DigitsData
from hpcrun.train.task import Task

Batch = list[Tensor]
"""Images [B, 1, 8, 8], classes [B], numbers [B]."""


class DigitsTask(Task):
    """A task that learns from scikit-learn's digits; its ``options`` say how they are parted."""

    unit = "images"
    options: DigitsData

    def prepare(self) -> None:
        """Raises UserError where scikit-learn is missing."""
        digits.require()

    def train_dataset(self) -> digits.Digits:
        return self.splits.train

    def validation_dataset(self) -> digits.Digits:
        return self.splits.validation

    @cached_property
    def splits(self) -> digits.Splits:
        return digits.splits(self.options.validation_fraction, self.options.test_fraction)
