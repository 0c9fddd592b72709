"""The ``extra`` state of a training run: objects, tensors and plain data besides model and optimizer.

The state is read at each save, and restored in place: the code that created a tensor or an object keeps using
it. With a new object, later saves would store the restored value forever.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.errors import one_line

_MAPPINGS = (dict, OrderedDict, Counter)


def taken(value: Any, where: str = "extra") -> Any:
    """Return ``value`` in the form to save: each object with a ``state_dict`` becomes its state.

    Raises:
        CheckpointError: ``value`` contains a copy that would not follow training.
    """
    if isinstance(value, Optimizer) and _is_sharded(value):
        raise CheckpointError(
            f"{where}: an optimizer of sharded parameters cannot be restored; put the models into "
            "one module (nn.ModuleDict), with one optimizer of several groups"
        )
    if _stateful(value):
        return value.state_dict()
    if type(value) in _MAPPINGS:
        if value.keys() == {"state", "param_groups"}:
            raise CheckpointError(
                f"{where}: this state_dict() of an optimizer is a copy, which does not change during "
                "training; pass the optimizer itself"
            )
        items = {key: taken(child, f"{where}.{key}") for key, child in value.items()}
        return items if type(value) is dict else type(value)(items)
    if type(value) in (list, tuple):
        return type(value)(taken(child, f"{where}.{i}") for i, child in enumerate(value))
    return value


def shards(extra: dict[str, Any]) -> dict[str, Any]:
    """Return the sharded tensors of ``extra``, with the same nesting: the targets of a restore."""
    found = {}
    for key, value in extra.items():
        value = value.state_dict() if _stateful(value) else value
        value = dict(enumerate(value)) if type(value) in (list, tuple) else value
        if isinstance(value, dict):
            value = shards(value) or None
        if isinstance(value, dict | DTensor):
            found[key] = value
    return found


def fill(live: Any, saved: Any, notes: list[str], where: str = "extra") -> Any:
    """Restore ``saved`` into ``live``, and return the value to use.

    An object, a tensor or a container is filled in place and returned; plain data is replaced.

    Args:
        notes: receives a line for each value that could not be filled in place.

    Raises:
        CheckpointError: an object does not accept its state.
    """
    if _stateful(live):
        try:
            live.load_state_dict(saved)
        except Exception as error:  # the user's own code
            raise CheckpointError(
                f"{where}: does not accept its state: {one_line(error)}"
            ) from error
        return live
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        if live.shape == saved.shape and live.dtype == saved.dtype:
            if live is not saved:
                try:
                    with torch.no_grad():
                        live.copy_(saved)
                except Exception as error:  # a sharded and a plain tensor, or an expanded view
                    raise CheckpointError(
                        f"{where}: cannot be filled: {one_line(error)}"
                    ) from error
            return live
        notes.append(
            f"{where}: is {saved.dtype} {tuple(saved.shape)} in the checkpoint, {live.dtype} "
            f"{tuple(live.shape)} here; it was replaced, not filled in place"
        )
    elif type(live) in _MAPPINGS and isinstance(saved, dict):
        filled = dict(_filled(live, saved, notes, where))
        live.clear()
        live.update(filled)
        return live
    elif type(live) in (list, tuple) and type(live) is type(saved) and len(live) == len(saved):
        pairs = enumerate(zip(live, saved, strict=True))
        values = [fill(here, there, notes, f"{where}.{i}") for i, (here, there) in pairs]
        if isinstance(live, tuple):
            return tuple(values)
        live[:] = values
        return live
    return saved


def _filled(
    live: dict[Any, Any], saved: dict[Any, Any], notes: list[str], where: str
) -> Iterator[tuple[Any, Any]]:
    for key, value in saved.items():
        below = f"{where}.{key}"
        yield key, fill(live[key], value, notes, below) if key in live else value
    for key, value in live.items():
        if key not in saved:
            notes.append(f"{where}.{key}: is not in the checkpoint; it was left unchanged")
            yield key, value


def _is_sharded(optimizer: Optimizer) -> bool:
    groups = (group["params"] for group in optimizer.param_groups)
    return any(isinstance(parameter, DTensor) for group in groups for parameter in group)


def _stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )
