"""Buffers that differ between ranks, such as batch norm statistics, since each rank sees other samples."""

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from hpcrun.checkpoint.state.names import bare, named_buffers


def broadcast(model: nn.Module) -> bool:
    """Return True if DDP copies rank 0's buffers to all ranks at every step, which is its default."""
    return isinstance(model, DistributedDataParallel) and model.broadcast_buffers


def capture_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return CPU copies by canonical name; on the CPU, the file loads before the device is in use."""
    return {name: buffer.detach().cpu().clone() for name, buffer in _persistent(model).items()}


def apply_buffers(saved: dict[str, Tensor], model: nn.Module) -> None:
    """Restore the result of :func:`capture_buffers`."""
    with torch.no_grad():
        for name, buffer in _persistent(model).items():
            buffer.copy_(saved[name])


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    # The model creates non-persistent buffers itself, and they may have grown (position caches).
    state = get_model_state_dict(bare(model)).keys()
    return {name: buffer for name, buffer in named_buffers(model) if name in state}
