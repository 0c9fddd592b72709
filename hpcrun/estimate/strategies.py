"""Strategies of parallelism for a fake run: the memory of torch's wrappers, without other ranks."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from hpcrun.config import Config
from hpcrun.devices.vendor import CompileMode
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.parallel import fsdp
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
    as with ``no_sync()``.
    """

    def __init__(self, *, view: bool) -> None:
        self._view, self._last = view, True
        self.buckets: list[Tensor] = []

    def wrap(self, module: nn.Module, mode: CompileMode | None) -> nn.Module:
        for parameter in module.parameters():
            if parameter.requires_grad:
                bucket = torch.empty_like(parameter, requires_grad=False)
                self.buckets.append(bucket)
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
        _parallel: str, distributed: DistributedConfig, amp: Any, options: Any
    ) -> Strategy:
        if parallel == "fsdp" and distributed.world_size > 1:
            return FSDPStrategy(distributed, options, amp.dtype)
        if parallel == "ddp":
            return FakeDDP(view=config.train.gradient_as_bucket_view)
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


def fsdp_parameters(module: nn.Module) -> Iterator[Any]:
    """Yield torch's record of each parameter that FSDP shards, or nothing if this torch hides them."""
    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        state: Any = part._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [
            getattr(state, "_fsdp_param_group", None)
        ]
        for group in groups:
            yield from getattr(group, "fsdp_params", ())
