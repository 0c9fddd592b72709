"""Estimate the memory that DDP needs on each rank, and compare it with the device: arithmetic of ``auto``.

Pure functions of numbers; ``choose.py`` supplies the numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hpcrun.checkpoint.storage.errors import amount

HEADROOM = 0.4
"""The fraction of a device's memory reserved for activations, workspaces and fragmentation."""

MANY_GRADIENTS = 2 * 10**9
"""Bytes of unsharded gradients from which FSDP reduces gradients in every micro-batch by default.

Not a part of the device's memory: another kind of GPU after a requeue would change the order of sums.
"""


@dataclass(frozen=True)
class Need:
    """Bytes that DDP keeps on every rank from step to step.

    ``average``: of the weights (``train.ema``); ``unsent``: PowerSGD's error feedback.
    """

    weights: int
    gradients: int
    optimizer: int
    average: int = 0
    unsent: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts in bytes."""
        return self.weights + self.gradients + self.optimizer + self.average + self.unsent


def need(
    parameters: Iterable[tuple[int, int, bool]],
    *,
    moments: int,
    bucket_view: bool = True,
    average: bool = False,
    unsent: bool = False,
) -> Need:
    """Compute the memory that training with DDP keeps for a model.

    Args:
        parameters: (number of elements, bytes per element, is trained) for each parameter.
        moments: optimizer tensors per trained parameter, of the parameter's size: two for Adam.
        bucket_view: True if gradients are views of DDP's buckets instead of separate tensors.
        average: True if an average of the weights is kept.
        unsent: True if compression keeps an error per gradient.
    """
    weights = trained = 0
    for elements, size, is_trained in parameters:
        weights += elements * size
        trained += elements * size * is_trained
    return Need(
        weights,
        gradients=trained * (1 if bucket_view else 2),
        optimizer=trained * moments,
        average=trained * average,
        unsent=trained * unsent,
    )


def fits(wanted: Need, memory: int) -> bool:
    """Return True if ``wanted`` leaves ``HEADROOM`` of ``memory`` bytes free."""
    return wanted.total <= memory * (1 - HEADROOM)


def summary(wanted: Need, memory: int) -> str:
    """Return the arithmetic in one line."""
    others = (
        (wanted.average, "averaged weights"),
        (wanted.unsent, "PowerSGD error feedback"),
    )
    more = "".join(f" + {amount(size)} of {name}" for size, name in others if size)
    return (
        f"{amount(wanted.weights)} of weights + {amount(wanted.gradients)} of gradients + "
        f"{amount(wanted.optimizer)} of optimizer state{more} = {amount(wanted.total)} per rank, "
        f"of {amount(memory)}; {HEADROOM:.0%} are reserved for activations"
    )
