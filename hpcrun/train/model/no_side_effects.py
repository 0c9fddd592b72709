"""Running a model without leaving a trace: what a pass changes beside its result is put back."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from hpcrun.checkpoint.state.capture import apply_rank, capture_rank


@contextlib.contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Put the module's buffers back after the block, those too that it replaces by other tensors."""
    kept = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    yield
    with torch.no_grad():
        for part, name, buffer, value in kept:
            buffer.copy_(value)
            setattr(part, name, buffer)


@contextlib.contextmanager
def kept_gradients(module: nn.Module) -> Iterator[None]:
    """Give every parameter the gradient back that it had before the block, in most cases none."""
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    yield
    for parameter, gradient in kept:
        parameter.grad = gradient


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Put the random generators back after the block, so that what it draws is nobody else's."""
    kept = capture_rank()
    yield
    apply_rank(kept)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for the block; then each part is again in the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
