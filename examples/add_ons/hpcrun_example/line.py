"""Fit a line through points: ``task: line``."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hpcrun import Task


class Line(Task):
    """A task of another package, with a short name."""

    def build_model(self) -> nn.Module:
        """Return one weight and one bias."""
        return nn.Linear(1, 1)

    def train_dataset(self) -> Dataset[Any]:
        """Return 64 points of y = 2 x + 1."""
        x = torch.linspace(-1, 1, 64)[:, None]
        return TensorDataset(x, 2 * x + 1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean square error."""
        x, y = batch
        return nn.functional.mse_loss(model(x), y)
