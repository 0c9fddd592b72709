"""Classification of digits: a small convolutional network with early stopping and a test split.

It is small enough for a laptop, but complete: it validates during training, stops when the loss no longer
improves (``train.patience``), and reports accuracy and confusions on separate test images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpcrun.config import Config
from hpcrun.tasks import digits
from hpcrun.tasks.digits_task import Batch, DigitsTask
from hpcrun.tasks.options.digits import ClassifierShape, DigitsData


class Classifier(DigitsTask):
    """Recognition of scikit-learn's handwritten digits."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.shape = ClassifierShape.model_validate(config.model.own)
        self.options = DigitsData.model_validate(config.data.own)

    def build_model(self) -> nn.Module:
        return ClassifierNetwork(self.shape)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy in nats per image."""
        images, classes, _ = batch
        # Under autocast the logits have half precision.
        return F.cross_entropy(model(images).float(), classes)

    def report(self, model: nn.Module, validation_loss: float | None) -> dict[str, Any]:
        """Return accuracy and confusions on the test split: rows are digits, columns are predictions."""
        test = self.splits.test
        answers = answered(model, test.images)
        table = torch.zeros(digits.CLASSES, digits.CLASSES, dtype=torch.int64)
        table.index_put_((test.classes, answers), torch.tensor(1), accumulate=True)
        losses = {} if validation_loss is None else {"validation_loss": validation_loss}
        return {
            **losses,
            "test_accuracy": (answers == test.classes).double().mean().item(),
            "test_images": len(test),
            "confusion_matrix": table.tolist(),
        }


class ClassifierNetwork(nn.Module):
    """Logits of ten classes from images: float [B, 1, 8, 8] -> float [B, 10]."""

    def __init__(self, shape: ClassifierShape) -> None:
        super().__init__()
        self.look = nn.Conv2d(1, shape.channels, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(shape.channels) for _ in range(shape.blocks))
        self.dropout = nn.Dropout(shape.dropout)
        self.answer = nn.Linear(shape.channels * (digits.SIDE // 2) ** 2, digits.CLASSES)

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


@torch.no_grad()
def answered(model: nn.Module, images: Tensor) -> Tensor:
    """Return the most likely class of each image, int64 [N] on the CPU."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        logits: Tensor = model(images.to(device))
    finally:
        model.train(training)
    return logits.argmax(-1).cpu()
