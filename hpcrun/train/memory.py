"""What a copy of the model takes on each rank, and whether there is room for it: the arithmetic of ``auto``.

Pure functions of numbers; ``parallel`` finds these out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hpcrun.checkpoint.errors import amount

HEADROOM = 0.4
"""The part of a device's memory that is left to activations, workspaces and fragmentation."""


@dataclass(frozen=True)
class Need:
    """Bytes that DDP keeps on every rank from step to step."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


def need(
    parameters: Iterable[tuple[int, int, bool]], *, moments: int, bucket_view: bool = True
) -> Need:
    """What training with DDP keeps of a model.

    Args:
        parameters: of each its number of elements, bytes of an element, and whether it is trained.
        moments: tensors that are kept beside each trained one, as large as it: two for Adam.
        bucket_view: whether gradients lie in DDP's buckets, and not beside them.
    """
    weights = trained = 0
    for elements, size, is_trained in parameters:
        weights += elements * size
        trained += elements * size * is_trained
    return Need(weights, trained * (1 if bucket_view else 2), trained * moments)


def fits(wanted: Need, memory: int) -> bool:
    """Whether it leaves ``HEADROOM`` of ``memory`` bytes."""
    return wanted.total <= memory * (1 - HEADROOM)


def told(wanted: Need, memory: int) -> str:
    """The arithmetic in one line."""
    return (
        f"{amount(wanted.weights)} of weights + {amount(wanted.gradients)} of gradients + "
        f"{amount(wanted.optimizer)} of optimiser state = {amount(wanted.total)} a rank, "
        f"of {amount(memory)}, {HEADROOM:.0%} of which are kept for activations"
    )
