"""Move the tensors of a batch to a device."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = (list, tuple, dict)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with every tensor on ``device``; dicts, lists, tuples and dataclasses are traversed.

    An object with its own ``to`` method moves itself: a PackedSequence keeps a part on the CPU, and some
    subclasses of dict or tuple hold more than their items.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if type(batch) not in _PLAIN and callable(getattr(batch, "to", None)):
        # Some ``to`` methods work in place, and counting FLOPs moves the batch to the meta device.
        own = copy.copy(batch)
        moved = own.to(device)
        return own if moved is None else moved
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(moved, field.name, to_device(getattr(batch, field.name), device))
        return moved
    return batch
