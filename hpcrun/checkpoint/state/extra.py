"""What a training saves besides its model and optimizer: objects, tensors and plain data of its own.

Read at each save and filled by a restore in place: who made a tensor or an object goes on using it, and
would otherwise save for ever after what the restore had read.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpcrun.checkpoint.sharded.collective import one_line
from hpcrun.checkpoint.storage.errors import CheckpointError

_MAPPINGS = (dict, OrderedDict, Counter)


def taken(value: Any, where: str = "extra") -> Any:
    """``value`` as it is saved: the state of each object that has one in its place.

    Raises:
        CheckpointError: it holds what does not follow the training.
    """
    if isinstance(value, Optimizer) and _is_sharded(value):
        raise CheckpointError(
            f"{where}: an optimizer of sharded parameters cannot come back from there; put the models into "
            "one module (nn.ModuleDict), with one optimizer of several groups"
        )
    if _stateful(value):
        return value.state_dict()
    if type(value) in _MAPPINGS:
        if value.keys() == {"state", "param_groups"}:
            raise CheckpointError(
                f"{where}: the state_dict() of an optimizer is a copy that does not follow it; give the "
                "optimizer itself"
            )
        items = {key: taken(child, f"{where}.{key}") for key, child in value.items()}
        return items if type(value) is dict else type(value)(items)
    if type(value) in (list, tuple):
        return type(value)(taken(child, f"{where}.{i}") for i, child in enumerate(value))
    return value


def shards(extra: dict[str, Any]) -> dict[str, Any]:
    """The sharded tensors in it, nested as they are: each rank loads its own parts into them."""
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
    """What belongs in the place of ``live``: itself, filled, where it is an object, a tensor or a container.

    Args:
        notes: gets a line for what could not be filled.

    Raises:
        CheckpointError: an object does not take its state.
    """
    if _stateful(live):
        try:
            live.load_state_dict(saved)
        except Exception as error:  # the user's own code
            raise CheckpointError(f"{where}: does not take its state: {one_line(error)}") from error
        return live
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        if live.shape == saved.shape and live.dtype == saved.dtype:
            if live is not saved:
                try:
                    with torch.no_grad():
                        live.copy_(saved)
                except (
                    Exception
                ) as error:  # a sharded one and a plain one, or a view of one element
                    raise CheckpointError(
                        f"{where}: cannot be filled: {one_line(error)}"
                    ) from error
            return live
        notes.append(
            f"{where}: is {saved.dtype} {tuple(saved.shape)} in the checkpoint, {live.dtype} "
            f"{tuple(live.shape)} here: replaced, not filled"
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
            notes.append(f"{where}.{key}: is not in the checkpoint: left as it is")
            yield key, value


def _is_sharded(optimizer: Optimizer) -> bool:
    groups = (group["params"] for group in optimizer.param_groups)
    return any(isinstance(parameter, DTensor) for group in groups for parameter in group)


def _stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )
