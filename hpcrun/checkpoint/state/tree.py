"""Splitting a nested state into named tensors and plain data, and joining them again.

Tensors go to disk as raw bytes, under names that do not depend on the sharding. The rest is small, and plain
enough for ``torch.load(weights_only=True)``.

The state is read at each save, and restored in place: the code that created a tensor or an object keeps using
it. With a new object, later saves would store the restored value forever.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcrun.errors import one_line
from hpcrun.storage.errors import CheckpointError

# A key of a real state contains no NUL, so no key of the user equals the mark.
_MARK = "\0tensor"


def split(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return ``state`` with a mark in place of each tensor, and the tensors by name (``model/0.weight``).

    Raises:
        CheckpointError: two tensors have the same name, or a key is the mark.
    """
    tensors: dict[str, torch.Tensor] = {}

    def walk(value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            if name in tensors:
                raise CheckpointError(f"{name}: two tensors of the state have this name")
            tensors[name] = value
            return {_MARK: name}
        if isinstance(value, dict):
            if _MARK in value:
                raise CheckpointError(f"{name}: the key {_MARK!r} cannot be saved")
            return _same_type(
                value, {key: walk(child, _below(name, key)) for key, child in value.items()}
            )
        if type(value) in (list, tuple):
            return type(value)(walk(child, _below(name, i)) for i, child in enumerate(value))
        return value

    return walk(state, ""), tensors


def join(skeleton: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the state that :func:`split` took apart, with ``tensors`` in place; raises KeyError."""
    if isinstance(skeleton, dict):
        if skeleton.keys() == {_MARK}:
            return tensors[skeleton[_MARK]]
        return _same_type(skeleton, {key: join(child, tensors) for key, child in skeleton.items()})
    if type(skeleton) in (list, tuple):
        return type(skeleton)(join(child, tensors) for child in skeleton)
    return skeleton


def name_of(skeleton: Any) -> str | None:
    """Return the name of the tensor that :func:`split` took from this place; None if it is no tensor."""
    if isinstance(skeleton, dict) and skeleton.keys() == {_MARK}:
        return str(skeleton[_MARK])
    return None


def _same_type(mapping: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return ``items`` in a mapping of the type of ``mapping``."""
    # Pass a mapping: a Counter would count pairs (MultiStepLR keeps its milestones in a Counter).
    return items if type(mapping) is dict else type(mapping)(items)


def _below(name: str, key: object) -> str:
    return f"{name}/{key}" if name else str(key)


# Names that only torch uses. DDP's name `module` is also common in user code.
_TORCH_ONLY = ("_orig_mod", "_checkpoint_wrapped_module")


def bare(model: nn.Module) -> nn.Module:
    """Return the model without its outer wrappers: DDP, DataParallel, ``torch.compile``."""
    # torch's state-dict helpers do not know DataParallel. They also confuse tensors if the model in DDP
    # has a submodule `module` and a sibling with the name of one of its submodules.
    while True:
        if isinstance(model, DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def replicated(model: nn.Module) -> bool:
    """Return True if DDP wraps the whole model, which keeps the parameters the same on all ranks."""
    while isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
        model = inner
    return isinstance(model, DistributedDataParallel)


def named_parameters(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters as ``torch.nn.Module.named_parameters``, without the names that wrappers add.

    Checkpoints use these names: they have no ``module.`` of DDP, ``_orig_mod.`` of ``torch.compile`` and
    ``_checkpoint_wrapped_module.`` of activation checkpointing.

    Args:
        model: a module, with or without wrappers.
        remove_duplicate: yield tied parameters only once.
    """
    model = bare(model)
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield _canonical(model, name), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers with their canonical names."""
    model = bare(model)
    for name, buffer in model.named_buffers():
        yield _canonical(model, name), buffer


def _canonical(model: nn.Module, name: str) -> str:
    kept, holder = [], model
    for part in name.split("."):
        of_ddp = part == "module" and isinstance(holder, DistributedDataParallel)
        if part not in _TORCH_ONLY and not of_ddp:
            kept.append(part)
        holder = getattr(holder, part)
    return ".".join(kept)


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
