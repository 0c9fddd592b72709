"""Turn BatchNorm into SyncBatchNorm, with statistics over the batches of all ranks."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def synchronized(model: Any, *, ranks: int, on_gpu: bool) -> Any:
    """Return ``model`` with every BatchNorm replaced, or unchanged if that is not possible.

    Weights, buffers, their names and ``requires_grad`` stay. Anything but a module is returned unchanged.
    """
    if not isinstance(model, nn.Module) or ranks == 1:
        return model
    if why_not_synchronized(model, ranks=ranks, on_gpu=on_gpu) is not None:
        return model
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]


def why_not_synchronized(model: Any, *, ranks: int, on_gpu: bool) -> str | None:
    """Return a line if ``train.sync_batchnorm`` has no effect on several ranks; else None.

    Args:
        on_gpu: torch's SyncBatchNorm refuses tensors of the CPU, so there the model stays as it is.
    """
    key = "train.sync_batchnorm"
    if not isinstance(model, nn.Module) or ranks == 1:
        return None
    if not any(isinstance(part, _BatchNorm) for part in model.modules()):
        return f"{key}: has no effect: the model has no BatchNorm"
    if not on_gpu:
        return (
            f"{key}: has no effect on the CPU, where torch has no SyncBatchNorm: each rank uses the "
            "statistics of only its samples"
        )
    return None
