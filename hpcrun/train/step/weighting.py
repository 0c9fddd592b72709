"""Weights of micro-batches with different numbers of samples or tokens."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Weight = float | Tensor


def loss_factors(
    weights: Sequence[Weight], total: float | None, *, ranks: int, device: torch.device
) -> Sequence[Weight]:
    """Return the factor of each micro-batch's mean loss, before gradients are averaged over ``ranks``.

    The weighted mean over all ranks is sum(loss * weight) / sum(weight), and the average over ranks
    divides by their number: hence loss * weight * ranks / sum(weight). Nothing is read back from the
    device.

    Raises:
        ValueError: a weight is not a scalar or is negative, or ``total`` is zero and a weight is not.
    """
    _require_weights(weights, total)
    if total is not None and not any(isinstance(weight, Tensor) for weight in weights):
        return [weight * ranks / (total or 1.0) for weight in weights]
    # float64: counts of tokens exceed the 24 bits of a float32.
    own = torch.stack([_on(weight, device) for weight in weights])
    # A negative weight becomes NaN, which skips the step.
    own.masked_fill_(own < 0, math.nan)
    everything = own.sum()
    if total is not None:
        everything.fill_(total)
    elif ranks > 1:
        dist.all_reduce(everything)
    # If all weights are zero, the gradients are zero instead of 0 / 0.
    everything.masked_fill_(everything == 0, 1.0)
    return (own * ranks / everything).float().unbind()


def weighted(loss: Tensor, factor: Weight) -> Tensor:
    """Return ``loss * factor``; 0 if the factor is 0, since the loss may be NaN (a mean of no samples)."""
    if not isinstance(factor, Tensor):
        return loss * factor
    return torch.where(factor == 0, 0.0, loss * factor)


def impossible(weight: Weight) -> bool:
    """Return True for a weight that is negative, infinite or NaN. Waits for the device."""
    return not 0 <= float(weight) < math.inf


def _require_weights(weights: Sequence[Weight], total: float | None) -> None:
    # Check tensors only as far as possible without waiting for the device.
    for index, weight in enumerate(weights):
        if isinstance(weight, Tensor):
            if weight.numel() != 1:
                raise ValueError(
                    f"the weight of micro-batch {index} has the shape {list(weight.shape)}; give a scalar, "
                    "such as its sum"
                )
        elif not weight >= 0:
            raise ValueError(
                f"the weight of micro-batch {index} is {weight:g}, which is not 0 or more"
            )
        elif weight and total is not None and not total > 0:
            raise ValueError(
                f"total={total:g} is not the sum of the weights over all ranks: that of micro-batch {index} "
                f"is {weight:g}"
            )


def _on(weight: Weight, device: torch.device) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.detach().to(device, torch.float64, non_blocking=True).reshape(())
    return torch.full((), weight, dtype=torch.float64, device=device)
