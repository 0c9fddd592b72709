"""What a ``Checkpointer`` is given, checked when it is made: what cannot work would show hours later."""

import math
import os
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
    """Raise CheckpointError unless these can work. Returns ``every``."""
    for name, value, kind in (
        ("model", model, nn.Module),
        ("optimizer", optimizer, Optimizer),
        ("extra", extra, dict),
    ):
        if not isinstance(value, kind):
            raise CheckpointError(
                f"{name}: is a {type(value).__name__}, not a {kind.__name__}; give one, and what else "
                "there is to save in extra={'name': …}"
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
    _require_within(model, optimizer)
    try:
        steps = index(every)
    except TypeError:
        steps = -1
    if steps < 0:
        raise CheckpointError(f"every={every!r}: give a whole number of steps; 0: no interval")
    return steps


def require_helpers(parts: dict[str, Any], retention: Any, stage_dir: Any) -> None:
    """Raise CheckpointError unless each of ``parts`` has a state, and the others are of their types."""
    for name, part in parts.items():
        has = all(callable(getattr(part, way, None)) for way in ("state_dict", "load_state_dict"))
        if part is not None and not has:
            raise CheckpointError(
                f"{name}: a {type(part).__name__} has no state_dict() and load_state_dict(); give one "
                "object that has, and more of them in extra={'name': …}"
            )
    if not isinstance(retention, Retention):
        raise CheckpointError(f"retention={retention!r}: give a Retention(…), or None")
    if stage_dir is not None and not isinstance(stage_dir, str | os.PathLike):
        raise CheckpointError(f"stage_dir={stage_dir!r}: give a folder's path, or None")


def require_step(step: Any) -> int:
    """``step`` as an int.

    Raises:
        TypeError: it is no whole number.
        CheckpointError: it is negative.
    """
    try:
        whole = index(step)
    except TypeError:
        raise TypeError(f"step={step!r}: not a whole number of steps") from None
    if whole < 0:
        raise CheckpointError(f"step {whole}: cannot be negative")
    return whole


def _require_named_weights(model: nn.Module) -> None:
    """Refuse FSDP1, which keeps the weights of a part in one flat parameter that differs with the ranks."""
    for name, part in model.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            raise CheckpointError(
                f"model: {f'its {name}' if name else 'it'} is wrapped in FullyShardedDataParallel (FSDP1), "
                "whose weights have no names of their own; use torch.distributed.fsdp.fully_shard (FSDP2) in "
                "its place: fully_shard(block) for each block, then fully_shard(model), and make the "
                "optimizer after it"
            )


def _require_within(model: nn.Module, optimizer: Optimizer) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    strangers = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in known
    ]
    if strangers:
        raise CheckpointError(
            f"the optimizer has {len(strangers)} parameters that the model has not, the first of shape "
            f"{tuple(strangers[0].shape)}; put a loss's own into one module with the model "
            "(nn.ModuleDict), and make the optimizer after the model was sharded"
        )
