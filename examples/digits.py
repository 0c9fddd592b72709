"""Handwritten digits from scikit-learn, 8 x 8 pixels: images to train on without a download.

`pip install scikit-learn` has them: 1,797 of the digits of Alpaydin and Kaynak (UCI repository, 1998). A
pixel is the number of inked points among the 4 x 4 points of a bitmap, 0 to 16. A hash of an image's number
decides its split, so changing the fraction of one split moves no image between the other two.
"""

from __future__ import annotations

import hashlib
from functools import cached_property

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from hpcrun import Task
from hpcrun.config.fields import Section, Shrinking
from hpcrun.errors import UserError

INK = 16
"""The largest value of a pixel."""
SIDE = 8
CLASSES = 10

Batch = list[Tensor]
"""Images [B, 1, 8, 8], classes [B], numbers [B]."""


class DigitsData(Section):
    """The ``data`` keys of the tasks on digits."""

    validation_fraction: Shrinking = Field(default=0.15, description="Images for validation.")
    test_fraction: Shrinking = Field(default=0.15, description="Images for the final report.")


class Digits(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Item i: the image, float32 [1, 8, 8] from 0 to 1, its class, and its number among all digits."""

    def __init__(self, images: Tensor, classes: Tensor, numbers: list[int]) -> None:
        self.numbers = torch.tensor(numbers)
        self.images, self.classes = images[self.numbers], classes[self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.images[index], self.classes[index], self.numbers[index]


def splits(validation_fraction: float, test_fraction: float) -> dict[str, Digits]:
    """Return the splits ``train``, ``validation`` and ``test``; the fractions are of all digits, on average.

    Raises:
        UserError: scikit-learn is missing, or a split has no digits.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError(
            f"data: the digits come with scikit-learn, which cannot be imported ({error}); "
            "pip install scikit-learn"
        ) from error
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / INK
    classes = torch.tensor(found.target, dtype=torch.int64)
    parts: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for number in range(len(images)):
        digest = hashlib.sha256(f"digit/{number}".encode()).digest()[:6]
        draw = int.from_bytes(digest, "big") / 2**48
        late = draw >= 1 - validation_fraction
        parts["test" if draw < test_fraction else "validation" if late else "train"].append(number)
    if empty := [name for name, numbers in parts.items() if not numbers]:
        raise UserError(
            f"data: the {empty[0]} split has no digits; change data.validation_fraction and "
            "data.test_fraction"
        )
    return {name: Digits(images, classes, numbers) for name, numbers in parts.items()}


class DigitsTask(Task):
    """Task on the digits: data and splits."""

    unit = "images"

    def prepare(self) -> None:
        """Raise UserError if scikit-learn is missing, or a split has no digits."""
        self.splits  # noqa: B018

    def train_dataset(self) -> Digits:
        return self.splits["train"]

    def validation_dataset(self) -> Digits:
        return self.splits["validation"]

    @cached_property
    def splits(self) -> dict[str, Digits]:
        """The three splits of the digits."""
        options = DigitsData.model_validate(self.config.data.own)
        return splits(options.validation_fraction, options.test_fraction)

    @torch.no_grad()
    def evaluated(self, model: torch.nn.Module, *inputs: Tensor) -> list[Tensor]:
        """Return the outputs of ``model`` in evaluation mode for ``inputs``, on the CPU."""
        device = next(model.parameters()).device
        training = model.training
        model.eval()
        try:
            outputs = model(*(each.to(device) for each in inputs))
        finally:
            model.train(training)
        return [each.cpu() for each in (outputs if isinstance(outputs, tuple) else (outputs,))]
