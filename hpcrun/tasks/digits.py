"""Handwritten digits from scikit-learn, 8 x 8 pixels: images to train on without a download.

1,797 of the digits of Alpaydin and Kaynak (UCI machine learning repository, 1998). Each pixel is the number
of inked points among the 4 x 4 points of a bitmap, 0 to 16. A hash of an image's number decides its split,
so changing the fraction of one split moves no image between the other two.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpcrun.errors import UserError

INK = 16
"""The largest value of a pixel."""
SIDE = 8
CLASSES = 10


class Digits(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Item i: the image, float32 [1, 8, 8] from 0 to 1, its class, and its number among all digits."""

    def __init__(self, numbers: list[int]) -> None:
        images, classes = _all()
        self.numbers = torch.tensor(numbers)
        self.images, self.classes = images[self.numbers], classes[self.numbers]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.images[index], self.classes[index], self.numbers[index]


@dataclass(frozen=True)
class Splits:
    """All digits, each in exactly one of the three splits."""

    train: Digits
    validation: Digits
    test: Digits


def splits(validation_fraction: float, test_fraction: float) -> Splits:
    """Split the digits; the fractions are of all digits, on average. Raises UserError as `require`."""
    require()
    parts: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for number in range(len(_all()[0])):
        draw = _draw(number)
        late = draw >= 1 - validation_fraction
        parts["test" if draw < test_fraction else "validation" if late else "train"].append(number)
    for name, numbers in parts.items():
        if not numbers:
            raise UserError(
                f"data: the {name} split has no digits; change data.validation_fraction and "
                "data.test_fraction"
            )
    return Splits(**{name: Digits(numbers) for name, numbers in parts.items()})


def require() -> None:
    """Raise UserError with a remedy if scikit-learn cannot be imported."""
    try:
        import sklearn.datasets  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"data: the digits come with scikit-learn, which cannot be imported ({error}); "
            "pip install scikit-learn"
        ) from error


@cache
def _all() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32) / INK
    return images.unsqueeze(1), torch.tensor(found.target, dtype=torch.int64)


def _draw(number: int) -> float:
    """Return a number in [0, 1) that depends only on the digit's number."""
    return int.from_bytes(hashlib.sha256(f"digit/{number}".encode()).digest()[:6], "big") / 2**48
