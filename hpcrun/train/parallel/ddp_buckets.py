"""Make DDP's bucket layout final before the first optimizer step."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hpcrun.checkpoint.state import capture
from hpcrun.ranks.collective import Ranks
from hpcrun.train.model.no_side_effects import kept_buffers, kept_gradients
from hpcrun.train.model.unused_parameters import require_all_used


def finalize_buckets(
    module: nn.Module,
    forward: Callable[[], Tensor],
    *,
    hook: AbstractContextManager[Any],
    ranks: Ranks,
) -> None:
    """Run one forward and backward pass that changes nothing but DDP's bucket layout. Collective.

    DDP rearranges its gradient buckets after the first backward pass of a process, and a gradient's position
    in a bucket decides the order in which a ring all-reduce adds the ranks' values. Without this pass, the
    first step after a resume would round differently from the same step of an uninterrupted run.

    Args:
        module: the module inside DDP; its gradients and buffers are restored.
        forward: returns the loss of a batch, computed through DDP.
        hook: context that keeps a DDP communication hook's state unchanged.
        ranks: all ranks, with a control group.

    Raises:
        UserError: the loss does not depend on all parameters.
    """
    generators = capture.capture_rank()
    with kept_buffers(module), kept_gradients(module), hook:
        value = forward()
        ranks.together(lambda: require_all_used(value, module))
        torch.autograd.backward(value)
    capture.apply_rank(generators)
