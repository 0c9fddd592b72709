"""Colors, names and the thinning of curves, which the figures of pages and terminals share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpcrun.printing import escaped

# The colors of Okabe and Ito (2008), which people with color vision deficiency can distinguish, without the
# yellow, which is too light on white.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = COLORS
INK, GRAY, PALE = "#1b1f24", "#8b939c", "#c9cfd6"
_NAMES = {
    "loss": "training loss",
    "validation_loss": "validation loss",
    "lr": "learning rate",
    "mfu": "model FLOP/s utilization",
    "memory_gb": "memory (GB)",
    "step_time": "step time (s)",
    "data_wait": "wait for data (s)",
}
Item = TypeVar("Item")


def label(text: str, longest: int = 44) -> str:
    """Return a foreign text as a label: on one line, without control characters, shortened in the middle."""
    text = escaped(text)
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[: longest - 1 - half]}…{text[-half:]}"


def metric_label(metric: str) -> str:
    """Return a metric in words, with its unit."""
    if metric.endswith("_per_second"):
        return f"{metric.removesuffix('_per_second').replace('_', ' ')} per second"
    return _NAMES.get(metric, metric.replace("_", " "))


def several(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def sampled(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most ``most`` of ``items``, evenly over their order."""
    if len(items) <= most:
        return list(items)
    return [items[at * len(items) // most] for at in range(most)]


def thinned(values: NDArray[Any], most: int) -> NDArray[np.int64]:
    """Return at most ``most`` indices of a curve: the ends, the lowest and highest of each chunk."""
    if len(values) <= most:
        return np.arange(len(values))
    kept = {0, len(values) - 1}
    for chunk in np.array_split(np.arange(len(values)), most // 2 - 1):
        kept |= {int(chunk[values[chunk].argmin()]), int(chunk[values[chunk].argmax()])}
    return np.array(sorted(kept))
