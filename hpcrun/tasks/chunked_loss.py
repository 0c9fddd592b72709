"""Cross-entropy of an output product in chunks of tokens, without the logits of all tokens in memory.

The forward pass computes the gradients of a chunk with its logits, so the backward pass needs no logits. The
number of operations is that of the plain computation. Source: Liger Kernel, Hsu et al. 2024,
arXiv:2410.10989. ``torch.nn.functional.linear_cross_entropy`` (torch 2.13) has chunks too, but returns the
loss in half precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_LOGITS = 2**28
"""Logits of a chunk: 1 GiB in float32, and enough tokens for full speed of the products."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_cross_entropy(
    states: Tensor, weight: Tensor, classes: Tensor, tokens: int | None = None
) -> Tensor:
    """Return the mean of ``cross_entropy(states @ weight.T, classes)`` in nats, float32 [].

    Under autocast the products have the precision of autocast; sums over classes and tokens are float32.

    Args:
        states: float [N, D].
        weight: float [V, D].
        classes: integer [N], from 0 to V - 1; nothing checks them.
        tokens: tokens of a chunk; None: as many as keep its logits at 1 GiB.
    """
    kind = states.device.type
    tokens = tokens or max(128, _LOGITS // weight.shape[0])
    apply: Any = _ChunkedLoss.apply
    # The forward pass of a Function always runs without gradients, so it cannot ask.
    wanted = [value.requires_grad and torch.is_grad_enabled() for value in (states, weight)]
    loss: Tensor
    if not torch.amp.is_autocast_available(kind):
        loss = apply(states, weight, classes, tokens, wanted)
        return loss
    if torch.is_autocast_enabled(kind):
        precision = torch.get_autocast_dtype(kind)
        states, weight = states.to(precision), weight.to(precision)
    with torch.autocast(kind, enabled=False):
        loss = apply(states, weight, classes, tokens, wanted)
    return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        classes: Tensor,
        tokens: int,
        wanted: list[bool],
    ) -> Tensor:
        of_states, of_weight = wanted
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        states_gradient = torch.empty_like(states) if of_states else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        for start in range(0, len(states), tokens):
            chunk = slice(start, start + tokens)
            part, right = states[chunk], classes[chunk]
            logits = (part @ weight.T).float()
            norm = logits.logsumexp(-1, keepdim=True)
            rows = torch.arange(len(part), device=states.device)
            total += (norm[:, 0] - logits[rows, right]).sum()
            if not (of_states or of_weight):
                continue
            # The gradient of the sum, not of the mean: float16 has no small numbers.
            slope = (logits - norm).exp_()
            slope[rows, right] -= 1
            slope = slope.to(states.dtype)
            if states_gradient is not None:
                states_gradient[chunk] = slope @ weight
            if weight_gradient is not None:
                weight_gradient += slope.T @ part
        if weight_gradient is not None and weight.dtype != torch.float16:
            # A sum over all tokens may overflow float16.
            weight_gradient = weight_gradient.to(weight.dtype)
        ctx.save_for_backward(states_gradient, weight_gradient)
        ctx.count, ctx.precision = len(states), weight.dtype
        return total / len(states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        factor = slope / ctx.count
        found = [
            None if gradient is None else (gradient * factor).to(ctx.precision)
            for gradient in ctx.saved_tensors
        ]
        return *found, None, None, None
