"""Run a model without side effects: restore buffers, gradients, random generators and modes afterwards."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from hpcrun.checkpoint.state.capture import apply_rank, capture_rank


@contextlib.contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers after the block, including replaced ones."""
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
    """Set the gradients to None for the block, and restore them afterwards."""
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    yield
    for parameter, gradient in kept:
        parameter.grad = gradient


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the random generators after the block."""
    kept = capture_rank()
    yield
    apply_rank(kept)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode for the block, and restore each submodule's mode afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
