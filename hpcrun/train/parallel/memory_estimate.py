"""What a copy of the model takes on each rank, and whether there is room for it: the arithmetic of ``auto``.

Pure functions of numbers; ``parallel`` finds these out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hpcrun.checkpoint.storage.errors import amount

HEADROOM = 0.4
"""The part of a device's memory that is left to activations, workspaces and fragmentation."""


@dataclass(frozen=True)
class Need:
    """Bytes that DDP keeps on every rank from step to step.

    ``average``: of the weights (``train.ema``); ``unsent``: what PowerSGD has yet to send of the gradients.
    """

    weights: int
    gradients: int
    optimizer: int
    average: int = 0
    unsent: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.average + self.unsent


def need(
    parameters: Iterable[tuple[int, int, bool]],
    *,
    moments: int,
    bucket_view: bool = True,
    average: bool = False,
    unsent: bool = False,
) -> Need:
    """What training with DDP keeps of a model.

    Args:
        parameters: of each its number of elements, bytes of an element, and whether it is trained.
        moments: tensors that the optimiser keeps of each trained one, as large as it: two for Adam.
        bucket_view: whether gradients lie in DDP's buckets, and not beside them.
        average: whether an average of the weights is kept.
        unsent: whether what compression leaves of the gradients is.
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
    """Whether it leaves ``HEADROOM`` of ``memory`` bytes."""
    return wanted.total <= memory * (1 - HEADROOM)


def told(wanted: Need, memory: int) -> str:
    """The arithmetic in one line."""
    others = (
        (wanted.average, "averaged weights"),
        (wanted.unsent, "gradients that PowerSGD has yet to send"),
    )
    more = "".join(f" + {amount(size)} of {name}" for size, name in others if size)
    return (
        f"{amount(wanted.weights)} of weights + {amount(wanted.gradients)} of gradients + "
        f"{amount(wanted.optimizer)} of optimiser state{more} = {amount(wanted.total)} a rank, "
        f"of {amount(memory)}, {HEADROOM:.0%} of which are kept for activations"
    )
