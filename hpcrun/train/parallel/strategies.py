"""How ranks share the work: how a module is wrapped for it, when gradients travel, how they are clipped.

A strategy holds no tensors. The trainer asks it at the few places where one way differs from another.
"""

import contextlib
import inspect
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.train.model.prepare import CompileMode, compile_in_place, of_torch

# torch 2.13 gives the old name a warning; before, there was only that.
_ddp_arguments = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _ddp_arguments else "broadcast_buffers"
)


class Strategy:
    """One process on one device: nothing is wrapped and nothing travels. The others change parts of it."""

    replaces_parameters = False
    """Whether wrapping gives the module other parameters, so that an optimiser made before is useless."""

    buffers_differ = False
    """Whether each rank keeps buffers of its own from step to step (otherwise rank 0's count)."""

    collective_forward = False
    """Whether a forward pass of one rank waits for the others' also where no gradients are wanted."""

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        """The module where it is to be wrapped."""
        return module.to(device)

    def remember(self, module: nn.Module) -> None:
        """Note what :meth:`whole` will need of the module before anything is done to it."""

    def wrap(self, module: nn.Module, mode: CompileMode | None) -> nn.Module:
        """What forward passes of training go through, compiled if ``mode`` is given. Collective."""
        return module if mode is None else cast(nn.Module, torch.compile(module, mode=mode))

    def micro_batch(
        self, model: nn.Module, *, last: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients travel in the last one of a step."""
        return contextlib.nullcontext()

    def compare(self, group: Any) -> None:
        """Have the ranks compare, in the next step, what they use of the model, over a control ``group``."""

    def before_backward(self, value: Tensor) -> None:
        """A loss is about to be differentiated; raises UserError where its backward pass would not end."""

    def join(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Around the micro-batches of a step that some ranks have none of. Raises ValueError without DDP."""
        raise ValueError("only DDP can take a step that some ranks have no batch for (Join)")

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients to a global norm of at most ``limit``; the norm before, a plain scalar."""
        return nn.utils.clip_grad_norm_(parameters, limit)

    def unsettled(self, model: nn.Module) -> bool:
        """Whether a first backward pass changes how later ones round."""
        return False

    def after_evaluation(self, model: nn.Module) -> None:
        """Leave nothing of forward passes without a backward pass that the next step could meet."""

    def whole(self, module: nn.Module, device: torch.device) -> nn.Module | None:
        """The module with all its weights, on rank 0 at least; None where it is not. Collective."""
        return module


class Scattered(Strategy):
    """One process for all GPUs it sees (torch.nn.DataParallel); on the CPU it is that one process."""

    def wrap(self, module: nn.Module, mode: CompileMode | None) -> nn.Module:
        if not any(parameter.is_cuda for parameter in module.parameters()):
            print(
                "hpcrun: parallel=dp has no GPUs to drive from one process here; it trains on the CPU, as "
                "`single` does",
                flush=True,
            )
            return module
        devices = torch.cuda.device_count()
        print(
            "hpcrun: parallel=dp drives all GPUs from one process, for quick tries: ddp, with one rank for "
            f"each of them ({devices} here), is faster",
            flush=True,
        )
        return nn.DataParallel(module) if devices > 1 else module


class Replicated(Strategy):
    """A copy of the module on each rank, gradients averaged by DistributedDataParallel."""

    def __init__(self, distributed: DistributedConfig) -> None:
        self._distributed = distributed
        self.buffers_differ = not distributed.broadcast_buffers

    def wrap(self, module: nn.Module, mode: CompileMode | None) -> nn.Module:
        buffers: dict[str, Any] = {_SYNC_BUFFERS: self._distributed.broadcast_buffers}
        wrapped = DistributedDataParallel(
            module,
            device_ids=list(self._distributed.device_ids) or None,
            find_unused_parameters=self._distributed.find_unused_parameters,
            **buffers,
            gradient_as_bucket_view=self._distributed.gradient_as_bucket_view,
        )
        if mode is not None and of_torch(module):
            # The compiler would not enter it from outside; its graph is cut where buckets end here too.
            compile_in_place(module, mode=mode)
        elif mode is not None:
            # In place, so that it stays the DDP module whose gradients can be held back.
            wrapped.compile(mode=mode)
        return wrapped

    def micro_batch(
        self, model: nn.Module, *, last: bool
    ) -> contextlib.AbstractContextManager[Any]:
        if isinstance(model, DistributedDataParallel) and not last:
            return model.no_sync()
        return contextlib.nullcontext()

    def join(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        if not isinstance(model, DistributedDataParallel):
            return super().join(model)
        return Join([model])

    def unsettled(self, model: nn.Module) -> bool:
        # With find_unused_parameters DDP keeps its first layout of buckets.
        return isinstance(model, DistributedDataParallel) and not model.find_unused_parameters
