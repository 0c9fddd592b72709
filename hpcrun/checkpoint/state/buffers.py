"""Buffers that belong to a rank: its batch norms have seen other samples than the others'."""

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from hpcrun.checkpoint.state.names import bare, named_buffers


def broadcast(model: nn.Module) -> bool:
    """Whether the ranks have rank 0's buffers at every step, as DDP gives them unless told otherwise."""
    return isinstance(model, DistributedDataParallel) and model.broadcast_buffers


def capture_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies on the CPU by canonical name: the file is loaded before the device is asked."""
    return {name: buffer.detach().cpu().clone() for name, buffer in _persistent(model).items()}


def apply_buffers(saved: dict[str, Tensor], model: nn.Module) -> None:
    """Put back what :func:`capture_buffers` gave."""
    with torch.no_grad():
        for name, buffer in _persistent(model).items():
            buffer.copy_(saved[name])


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    # Others are made anew by the model, and may have grown meanwhile (caches of positions).
    state = get_model_state_dict(bare(model)).keys()
    return {name: buffer for name, buffer in named_buffers(model) if name in state}
