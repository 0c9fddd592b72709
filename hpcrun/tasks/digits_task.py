"""Base class of the tasks on handwritten digits: data and splits."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from hpcrun.tasks import digits
from hpcrun.tasks.options.digits import DigitsData
from hpcrun.train.task import Task

Batch = list[Tensor]
"""Images [B, 1, 8, 8], classes [B], numbers [B]."""


class DigitsTask(Task):
    """Task on scikit-learn's digits; its ``options`` give the fractions of the splits."""

    unit = "images"
    options: DigitsData

    def prepare(self) -> None:
        """Raise UserError if scikit-learn is missing."""
        digits.require()

    def train_dataset(self) -> digits.Digits:
        return self.splits.train

    def validation_dataset(self) -> digits.Digits:
        return self.splits.validation

    @cached_property
    def splits(self) -> digits.Splits:
        return digits.splits(self.options.validation_fraction, self.options.test_fraction)
