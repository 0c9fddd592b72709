"""Classification of digits: a small convolutional network with early stopping and a test split.

    hpcrun submit -c configs/classifier.yaml

It validates during training, stops when the loss no longer improves (``train.patience``), and reports
accuracy and confusions on separate test images. Copy the file to change it.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from examples.digits import CLASSES, SIDE, Batch, DigitsTask
from hpcrun.config import Config
from hpcrun.config.fields import BelowOne, Count, Section


class ClassifierShape(Section):
    """The ``model`` section."""

    blocks: Count = Field(default=2, description="Residual convolutions.")
    channels: Count = Field(default=16, description="Channels of each convolution.")
    dropout: BelowOne = Field(default=0.1, description="Features set to zero in training.")


class Classifier(DigitsTask):
    """Recognition of scikit-learn's handwritten digits."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.shape = ClassifierShape.model_validate(config.model.own)

    def build_model(self) -> nn.Module:
        return ClassifierNetwork(self.shape)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy in nats per image."""
        images, classes, _ = batch
        # Under autocast the logits have half precision.
        return F.cross_entropy(model(images).float(), classes)

    def report(self, model: nn.Module, validation_loss: float | None) -> dict[str, Any]:
        """Return accuracy and confusions on the test split: rows are digits, columns are predictions."""
        test = self.splits["test"]
        answers = self.evaluated(model, test.images)[0].argmax(-1)
        table = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
        table.index_put_((test.classes, answers), torch.tensor(1), accumulate=True)
        losses = {} if validation_loss is None else {"validation_loss": validation_loss}
        return {
            **losses,
            "test_accuracy": (answers == test.classes).double().mean().item(),
            "confusion_matrix": table.tolist(),
        }


class ClassifierNetwork(nn.Module):
    """Logits of ten classes from images: float [B, 1, 8, 8] -> float [B, 10]."""

    def __init__(self, shape: ClassifierShape) -> None:
        super().__init__()
        self.look = nn.Conv2d(1, shape.channels, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(shape.channels) for _ in range(shape.blocks))
        self.dropout = nn.Dropout(shape.dropout)
        self.answer = nn.Linear(shape.channels * (SIDE // 2) ** 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.look(images)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.answer(self.dropout(F.max_pool2d(x, 2).flatten(1)))
        return logits


class ResidualBlock(nn.Module):
    """Convolution with a residual connection, normalized over each image separately."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # No batch norm: its running statistics would differ between ranks.
        self.norm = nn.GroupNorm(1, channels)
        self.convolve = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.convolve(self.norm(x)))
