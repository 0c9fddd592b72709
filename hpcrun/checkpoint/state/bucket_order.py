"""The order of DDP's gradient buckets after a resume.

DDP arranges its gradient buckets again after the first backward pass of a process, in the order in which
the gradients are ready. A gradient's position decides the order in which an all-reduce adds the values of
three or more ranks. So the first step of a resumed process would round differently from the same step of an
undisturbed process, which has arranged its buckets long before.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcrun.checkpoint.state.hook_state import kept_hooks
from hpcrun.errors import UserError


class BucketOrder:
    """Order of the gradients in the first backward pass, to save in a checkpoint.

    :meth:`load_state_dict` repeats this order in a backward pass with gradients that are thrown away. Without
    DDP it does nothing.

    Args:
        model: a model that may be in DDP, or have parts in DDP.
        for_hooks: a communication hook may keep state for each bucket, so the order matters for any number of
            ranks; otherwise it matters from three ranks on, and with fewer the object does nothing.

    Raises:
        UserError: DDP has ``static_graph=True``: its first step cannot be repeated. With ``for_hooks``, the
            states of the hooks refuse it, if there are any.
    """

    def __init__(self, model: nn.Module, *, for_hooks: bool = False) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 2
        parts = model.modules() if several or for_hooks else ()
        # With find_unused_parameters, DDP keeps its first buckets.
        self._parts = [
            _Part(one)
            for one in parts
            if isinstance(one, DistributedDataParallel)
            and not one.find_unused_parameters
            and not (for_hooks and one.static_graph)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the parameters of each DDP module, in order; empty before a backward pass."""
        return {"orders": [part.order for part in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make DDP arrange its buckets in the saved order. Collective; all gradients become None."""
        for part, order in zip(self._parts, state["orders"], strict=False):
            part.repeat(order)


class _Part:
    def __init__(self, ddp: DistributedDataParallel) -> None:
        if ddp.static_graph:
            raise UserError(
                "model: with DistributedDataParallel(static_graph=True), the first step after a resume adds "
                "gradients in another order; remove static_graph"
            )
        self._ddp, self.order = ddp, list[str]()
        self._hooks = [
            cast(Any, parameter).register_post_accumulate_grad_hook(self._noter(name))
            for name, parameter in ddp.named_parameters()
            if parameter.requires_grad
        ]

    def repeat(self, order: list[str]) -> None:
        """Run a backward pass in which the gradients are ready in ``order``."""
        parameters = dict(self._ddp.named_parameters())
        if self.order == order:  # arranged before, in this process
            return
        if not order or len(order) != len(self._hooks) or not parameters.keys() >= set(order):
            return
        with kept_hooks(self._ddp):
            self._ddp.reducer.prepare_for_backward([])
            for name in order:
                with torch.enable_grad():
                    torch.autograd.backward(parameters[name].sum())
        for name in order:
            parameters[name].grad = None

    def _noter(self, name: str) -> Any:
        def note(_: torch.Tensor) -> None:
            if not self._ddp.require_backward_grad_sync:
                return
            self.order.append(name)
            if len(self.order) == len(self._hooks):
                for hook in self._hooks:
                    hook.remove()

        return note
