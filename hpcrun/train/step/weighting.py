"""How much the mean loss of each micro-batch counts where they do not hold equally many samples or tokens."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

Weight = float | Tensor


def loss_factors(
    weights: Sequence[Weight], total: float | None, *, ranks: int, device: torch.device
) -> Sequence[Weight]:
    """What to multiply each micro-batch's mean loss with, before gradients are averaged over ``ranks``.

    The weighted mean over all ranks is sum(loss * weight) / sum(weight), and the average over ranks
    divides by their number: hence loss * weight * ranks / sum(weight). Nothing is read back from the
    device.

    Args:
        weights: of this rank's micro-batches, scalars.
        total: the sum over all micro-batches of all ranks where it is known; None sums them up, which
            is collective.

    Raises:
        ValueError: a weight is no scalar, or a number below zero, or ``total`` leaves no room for it.
    """
    _require_weights(weights, total)
    if total is not None and not any(isinstance(weight, Tensor) for weight in weights):
        return [weight * ranks / (total or 1.0) for weight in weights]
    # Counts of tokens outgrow the 24 bits of a float.
    own = torch.stack([_on(weight, device) for weight in weights])
    # As one that is no number, which skips the step: less than nothing cannot count.
    own.masked_fill_(own < 0, math.nan)
    everything = own.sum()
    if total is not None:
        everything.fill_(total)
    elif ranks > 1:
        dist.all_reduce(everything)
    # Nothing counts at all: zero gradients, and not those of 0 / 0.
    everything.masked_fill_(everything == 0, 1.0)
    return (own * ranks / everything).float().unbind()


def weighted(loss: Tensor, factor: Weight) -> Tensor:
    """``loss * factor``; where that is zero, the loss may be the mean of nothing: not a number."""
    if not isinstance(factor, Tensor):
        return loss * factor
    return torch.where(factor == 0, 0.0, loss * factor)


def impossible(weight: Weight) -> bool:
    """Whether nothing can count so: less than zero, infinite, or no number. Waits for the device."""
    return not 0 <= float(weight) < math.inf


def without_loss(weighed: Sequence[tuple[Tensor, Weight]]) -> list[int]:
    """Which of these losses with their factors :func:`weighted` has left out as means of nothing.

    Their gradients may be no numbers either, as those of ``x.sum() / n`` with n zero, whatever the factor.
    Waits for the device.
    """
    return [
        index
        for index, (loss, factor) in enumerate(weighed)
        if float(factor) == 0 and not math.isfinite(loss.item())
    ]


def share_gradients(
    parameters: Sequence[nn.Parameter], device: torch.device, *, wanting: bool
) -> None:
    """Give the ranks that are ``wanting`` the gradients of rank 0, the others' as well. Collective."""
    has = torch.tensor([parameter.grad is not None for parameter in parameters], device=device)
    dist.broadcast(has, src=0)
    for parameter, there in zip(parameters, has.tolist(), strict=True):
        if not there:
            continue
        gradient = parameter.grad
        if wanting or gradient is None:
            gradient = torch.empty_like(parameter, requires_grad=False)
        dist.broadcast(gradient, src=0)
        if wanting:
            parameter.grad = gradient


def _require_weights(weights: Sequence[Weight], total: float | None) -> None:
    # Of a tensor only what is known without waiting for its device.
    for index, weight in enumerate(weights):
        if isinstance(weight, Tensor):
            if weight.numel() != 1:
                raise ValueError(
                    f"the weight of micro-batch {index} has the shape {list(weight.shape)}, and a scalar is "
                    "wanted, such as its sum"
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
