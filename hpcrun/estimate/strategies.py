"""Strategies of parallelism for a fake run: the memory of torch's wrappers, without other ranks.

A fake run needs no GPU build of torch, so its tensors are on the CPU. Autocast's rules, dropout and attention
differ there: on a GPU autocast computes norms and exponentials in fp32, dropout keeps a mask of one byte per
element, and attention with dropout does not store its matrix.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from hpcrun.config import Config
from hpcrun.devices.vendor import CompileMode
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.parallel import fsdp
from hpcrun.train.parallel.comm_hooks import Compression
from hpcrun.train.parallel.fsdp import FSDPStrategy
from hpcrun.train.parallel.strategies import Strategy
from hpcrun.train.step import trainer as trainer_module


class FakeSingle(Strategy):
    """A single rank on fake tensors, which have no data to move to a device."""

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        return module


class FakeDDP(FakeSingle):
    """The memory of DistributedDataParallel: buckets as large as all gradients.

    Torch's own wrapper reads real data at its construction. With ``view``, gradients move into the buckets
    when they are complete, in a step's last micro-batch; before that they exist in addition to the buckets,
    as with ``no_sync()``. With ``errors``, PowerSGD keeps as much again.
    """

    def __init__(self, *, view: bool, errors: bool) -> None:
        self._view, self._last, self._errors = view, True, errors
        self._buckets: list[Tensor] = []
        self._kept: list[Tensor] = []

    def wrap(self, module: nn.Module, mode: CompileMode | None) -> nn.Module:
        for parameter in module.parameters():
            if parameter.requires_grad:
                bucket = torch.empty_like(parameter, requires_grad=False)
                self._buckets.append(bucket)
                if self._errors:
                    self._kept.append(torch.empty_like(bucket))
                if self._view:
                    hooked: Any = parameter
                    hooked.register_post_accumulate_grad_hook(self._into(bucket))
        return module

    def _into(self, bucket: Tensor) -> Any:
        def move(parameter: Tensor) -> None:
            if self._last:
                parameter.grad = bucket

        return move

    @contextlib.contextmanager
    def micro_batch(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        self._last = last
        yield


@contextlib.contextmanager
def fake_strategies(config: Config, parallel: str, mesh: DeviceMesh | None) -> Iterator[None]:
    """Make trainers in the block use the strategies of this module, and FSDP use ``mesh``."""

    def strategy(
        _parallel: str,
        distributed: DistributedConfig,
        amp: Any,
        options: Any,
        compression: Compression,
        *_: Any,
    ) -> Strategy:
        if parallel == "fsdp" and distributed.world_size > 1:
            return FSDPStrategy(distributed, options, amp.dtype)
        if parallel == "ddp":
            view, errors = config.train.gradient_as_bucket_view, compression.hook == "powersgd"
            return FakeDDP(view=view, errors=errors)
        return FakeSingle()

    # A mesh would ask all ranks for their positions, but there are no other ranks.
    trainers: Any = trainer_module
    sharding: Any = fsdp
    before = trainers.strategy, sharding.make_mesh
    trainers.strategy, sharding.make_mesh = strategy, lambda *_: mesh
    try:
        yield
    finally:
        trainers.strategy, sharding.make_mesh = before


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
