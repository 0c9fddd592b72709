"""DDP's bucket layout made final before the first step that counts."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from hpcrun.checkpoint.state import capture
from hpcrun.train.model.no_side_effects import kept_buffers, kept_gradients
from hpcrun.train.model.unused_parameters import require_all_used
from hpcrun.train.parallel.collective import together


def settle_buckets(
    module: nn.Module,
    forward: Callable[[], Tensor],
    *,
    hook: AbstractContextManager[Any],
    rank: int,
    group: Any,
) -> None:
    """Run one forward and backward pass of which nothing but DDP's bucket layout remains. Collective.

    DDP regroups its gradient buckets after the first backward pass of a process, and where a
    gradient lies in a bucket decides in which order a ring adds the ranks' values. Without this
    the first step after a resume would round differently from the same step undisturbed.

    Args:
        module: the one that DDP wraps; its gradients and buffers come back as they were.
        forward: gives the loss of a batch, through the wrapper.
        hook: around the pass; keeps a hook of DDP's idle.
        group: a control group of all ranks, or None for a single one.

    Raises:
        UserError: the loss does not depend on all parameters.
    """
    generators = capture.capture_rank()
    with kept_buffers(module), kept_gradients(module), hook:
        value = forward()
        together(lambda: require_all_used(value, module), rank=rank, group=group)
        torch.autograd.backward(value)
    capture.apply_rank(generators)
