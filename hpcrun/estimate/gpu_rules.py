"""GpuRules: let operations on the CPU keep the tensors that they would keep on a GPU.

A fake run needs no GPU build of torch, so its tensors are on the CPU. Autocast's rules, dropout and attention
differ there: on a GPU autocast computes norms and exponentials in fp32, dropout keeps a mask of one byte per
element, and attention with dropout does not store its matrix.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

# From ATen/autocast_mode.h of torch 2.13: the functions that run in fp32 on CUDA, by their Python names.
_IN_FP32 = frozenset(
    (
        *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"),
        *("reciprocal", "rsqrt", "sinh", "tan", "pow", "__pow__", "__rpow__", "softplus"),
        *("layer_norm", "rms_norm", "group_norm", "norm", "cosine_similarity", "logsumexp"),
        *("poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "cross_entropy", "kl_div"),
        *("hinge_embedding_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"),
        *("margin_ranking_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss"),
        *("binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "interpolate"),
        *("prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum"),
    )
)

_DROPOUT = 4
"""Position of ``dropout_p`` among the arguments of attention."""


class GpuRules(TorchFunctionMode):
    """Applies the rules of a GPU to the functions that a task calls."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is torch.autograd.backward:
            # Otherwise torch would not apply the rules in the whole pass, and so not in recomputed blocks.
            with self:
                return _backward(args[0])
        if name == "dropout" and (dropped := _dropout(args, kwargs)) is not None:
            return dropped
        if name == "scaled_dot_product_attention":
            # The kernel of the CPU has no dropout; torch would store the whole matrix instead.
            if len(args) > _DROPOUT:
                args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        if name in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_in_fp32, args), tree_map(_in_fp32, kwargs)
            with torch.autocast("cpu", enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _backward(losses: Any) -> Any:
    """Run the backward pass of the scalars ``losses``, as ``torch.autograd.backward`` does internally."""
    losses = (losses,) if isinstance(losses, Tensor) else tuple(losses)
    engine: Any = torch.autograd.Variable._execution_engine
    return engine.run_backward(
        losses,
        tuple(map(torch.ones_like, losses)),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _dropout(args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the result of dropout on a GPU; None if nothing is dropped, or for the in-place version."""
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    # torch.dropout calls its second switch ``train``, and has no default.
    training = given.get("train", given.get("training", True))
    share = given.get("p", 0.5)
    if not training or not 0 < share < 1 or given.get("inplace"):
        return None
    result: Tensor = torch.native_dropout(given["input"], share, True)[0]
    return result


def _in_fp32(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value
