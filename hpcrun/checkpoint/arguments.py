"""Checks of the arguments of a ``Checkpointer``, at construction: otherwise an error appears hours later."""

import math
from operator import index
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.checkpoint.storage.retention import Retention


def require_arguments(
    model: Any,
    optimizer: Any,
    extra: Any,
    every: Any,
    minutes: Any,
    failure_hours: Any,
    host_memory: Any,
) -> int:
    """Check the arguments, and return ``every`` as an int.

    Raises:
        CheckpointError: an argument has the wrong type or an impossible value.
    """
    for name, value, kind in (
        ("model", model, nn.Module),
        ("optimizer", optimizer, Optimizer),
        ("extra", extra, dict),
    ):
        if not isinstance(value, kind):
            raise CheckpointError(
                f"{name}: is a {type(value).__name__}, not a {kind.__name__}; pass a {kind.__name__}, and "
                "other objects to save in extra={'name': …}"
            )
    for name, value in (
        ("minutes", minutes),
        ("failure_hours", failure_hours),
        ("host_memory", host_memory),
    ):
        number = isinstance(value, int | float) and math.isfinite(value) and value > 0
        if value is not None and not number:
            raise CheckpointError(f"{name}={value!r}: give a number above 0, or None")
    _require_named_weights(model)
    try:
        steps = index(every)
    except TypeError:
        steps = -1
    if steps < 0:
        raise CheckpointError(f"every={every!r}: give a whole number of steps; 0: no interval")
    return steps


def require_helpers(parts: dict[str, Any], retention: Any) -> None:
    """Raise CheckpointError unless each part has ``state_dict`` methods, and ``retention`` is a rule."""
    for name, part in parts.items():
        has = all(callable(getattr(part, way, None)) for way in ("state_dict", "load_state_dict"))
        if part is not None and not has:
            raise CheckpointError(
                f"{name}: a {type(part).__name__} has no state_dict() and load_state_dict(); pass an "
                "object that has both; pass further objects in extra={'name': …}"
            )
    if not isinstance(retention, Retention):
        raise CheckpointError(f"retention={retention!r}: give a Retention(…), or None")


def require_step(step: Any) -> int:
    """Return ``step`` as an int.

    Raises:
        TypeError: ``step`` is not an integer.
        CheckpointError: ``step`` is negative.
    """
    try:
        whole = index(step)
    except TypeError:
        raise TypeError(f"step={step!r}: not a whole number of steps") from None
    if whole < 0:
        raise CheckpointError(f"step {whole}: cannot be negative")
    return whole


def _require_named_weights(model: nn.Module) -> None:
    """Refuse FSDP1: its flat parameters depend on the number of ranks."""
    for name, part in model.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            raise CheckpointError(
                f"model: {f'its {name}' if name else 'it'} is wrapped in FullyShardedDataParallel (FSDP1), "
                "and its flat weights have no names; use torch.distributed.fsdp.fully_shard (FSDP2) in "
                "place of FSDP1: fully_shard(block) for each block, then fully_shard(model), and make the "
                "optimizer after that"
            )
