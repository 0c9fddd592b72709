"""Strategies of parallelism: how to wrap a module, when to all-reduce gradients, how to clip them.

A strategy holds no tensors. The trainer calls it at the few points where the kinds of parallelism differ.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpcrun.devices import accelerator, vendor
from hpcrun.devices.vendor import CompileMode
from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.model.prepare import blocks, compile_in_place, of_torch
from hpcrun.train.parallel.comm_hooks import Compression
from hpcrun.train.parallel.network import default_bucket

# torch 2.13 deprecates the old name; earlier versions have only the old name.
_ddp_arguments = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _ddp_arguments else "broadcast_buffers"
)

NOTHING = contextlib.nullcontext()


class Strategy:
    """Single process on one device: no wrapper, no communication. Subclasses override parts of it."""

    replaces_parameters = False
    """True if wrapping replaces the module's parameters, so that an earlier optimizer becomes invalid."""

    buffers_differ = False
    """True if the ranks keep different buffers between steps; False if rank 0's buffers are used."""

    collective_forward = False
    """True if a forward pass of one rank waits for the other ranks even without gradients."""

    casts = False
    """True if the wrapper converts weights and inputs to half precision, instead of autocast."""

    auto_reduces = False
    """The value of ``fsdp.reduce_each_micro_batch=auto`` with the wrapped model."""

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Move the module to the device where it is wrapped."""
        return module.to(device)

    def remember(self, module: nn.Module) -> None:
        """Record what :meth:`whole` needs of the module, before preparation and wrapping."""

    def wrap(self, module: nn.Module, mode: CompileMode | None) -> nn.Module:
        """Return the module for forward passes of training, compiled if ``mode`` is given. Collective."""
        return module if mode is None else cast(nn.Module, torch.compile(module, mode=mode))

    def micro_batch(
        self, model: nn.Module, *, last: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """Wrap forward and backward of a micro-batch: only the last one of a step all-reduces gradients."""
        return NOTHING

    def compare(
        self, ranks: Ranks, model: nn.Module, forwards: Sequence[Callable[[], Tensor]]
    ) -> None:
        """Compare before or in the next step which parts of ``model`` the ``ranks`` use."""

    def before_backward(self, value: Tensor) -> None:
        """Check a loss before its backward pass; raise UserError if the backward pass would hang."""

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Clip the gradients to a global norm of ``limit``; return the norm before, a plain scalar."""
        return nn.utils.clip_grad_norm_(parameters, limit)

    def changes_buckets(self, model: nn.Module) -> bool:
        """Return True if the first backward pass changes how later ones round."""
        return False

    def after_evaluation(self, model: nn.Module) -> None:
        """Clean up after forward passes without a backward pass, before the next step."""

    def whole(self, module: nn.Module, device: torch.device) -> nn.Module | None:
        """Return the module with all its weights, on rank 0 at least; elsewhere maybe None. Collective."""
        return module


class DataParallelStrategy(Strategy):
    """One process for several GPUs (``torch.nn.DataParallel``); on the CPU, the plain module."""

    def __init__(self, devices: Sequence[int] | None = None) -> None:
        """``devices``: numbers of the GPUs; None: all that the process sees."""
        self._devices = devices

    def wrap(self, module: nn.Module, mode: CompileMode | None) -> nn.Module:
        """Raises UserError for ``mode``: DataParallel copies the model in every step."""
        if mode is not None:
            raise UserError(
                "parallel=dp copies the model in every step; use ddp, or no compilation"
            )
        if not any(accelerator.is_accelerator(value.device) for value in module.parameters()):
            print("hpcrun: parallel=dp finds no GPU; it trains on the CPU, as single", flush=True)
            return module
        chosen = list(range(accelerator.count())) if self._devices is None else list(self._devices)
        print(
            f"hpcrun: parallel=dp trains on {len(chosen)} GPUs from one process; ddp with a rank for "
            "each GPU is faster",
            flush=True,
        )
        return nn.DataParallel(module, chosen) if len(chosen) > 1 else module


class DDPStrategy(Strategy):
    """A copy of the module on each rank; DistributedDataParallel averages the gradients."""

    def __init__(
        self, distributed: DistributedConfig, compression: Compression | None = None
    ) -> None:
        self._distributed, self._compression = distributed, compression or Compression()
        self.buffers_differ = not distributed.broadcast_buffers

    def wrap(self, module: nn.Module, mode: CompileMode | None) -> nn.Module:
        gradients = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        buffers: dict[str, Any] = {_SYNC_BUFFERS: self._distributed.broadcast_buffers}
        wrapped = DistributedDataParallel(
            module,
            device_ids=list(self._distributed.device_ids) or None,
            find_unused_parameters=self._distributed.find_unused_parameters,
            **buffers,
            gradient_as_bucket_view=self._distributed.gradient_as_bucket_view,
            bucket_cap_mb=self._distributed.bucket_mb
            or default_bucket(gradients, self._distributed.world_size),
        )
        self._compression.attach(wrapped)
        # A graph of the whole model would be split where DDP's buckets end, into other graphs for each
        # bucket. Blocks of a class share a graph. CUDA graphs pay for the whole model only.
        parts = [] if mode is None or mode in vendor.WITHOUT_GRAPHS else blocks(module)
        if parts:
            from torch._dynamo import config

            switches: Any = config
            switches.optimize_ddp = False
        for part in parts:
            compile_in_place(part, mode=mode)
        if mode is not None and not parts:
            if of_torch(module):
                # torch.compile skips calls of torch's own classes.
                compile_in_place(module, mode=mode)
            else:
                # In place, so that the model stays a DDP module with no_sync().
                wrapped.compile(mode=mode)
        return wrapped

    def micro_batch(
        self, model: nn.Module, *, last: bool
    ) -> contextlib.AbstractContextManager[Any]:
        if isinstance(model, DistributedDataParallel) and not last:
            return model.no_sync()
        return NOTHING

    def changes_buckets(self, model: nn.Module) -> bool:
        # With find_unused_parameters DDP keeps its first bucket layout.
        return isinstance(model, DistributedDataParallel) and not model.find_unused_parameters


@torch.no_grad()
def copy_from_rank_zero(value: Tensor) -> None:
    """Replace the values of ``value`` on all ranks by rank 0's, in place. Collective on the default group.

    NCCL refuses tensors that are not contiguous, such as a transposed filter bank, and does not know int16
    and uint16. So the values are sent as bytes, through a contiguous copy if necessary.
    """
    dense = value.contiguous()
    dist.broadcast(dense.reshape(-1).view(torch.uint8), src=0)
    if dense is not value:
        value.copy_(dense)
