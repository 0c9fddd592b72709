"""Checks that a model and its optimizer can be saved, and that a checkpoint fits them.

All checks run before a tensor is loaded, so that a refused restore changes nothing.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hpcrun.checkpoint.state.tree import bare, named_buffers, named_parameters
from hpcrun.storage.errors import CheckpointError
from hpcrun.storage.index import TensorEntry

KERNELS = ("fused", "foreach")
_OPTIONS = "resume with the same model options, or give this training its own folder"
# Keys that schedulers add to an optimizer's groups.
_SCHEDULED = ("initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr")
_EXTRA_STATE = "_extra_state"


def require_saveable(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise CheckpointError if a checkpoint would miss part of the optimizer's state."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise CheckpointError(
            f"optimizer: {kind} is not a torch.optim.Optimizer; pass an optimizer of the model's parameters"
        )
    for name, inner in vars(optimizer).items():
        if isinstance(inner, Optimizer) and inner.state is not optimizer.state:
            raise CheckpointError(
                f"{kind} keeps its state in its {name} ({type(inner).__name__}), so a checkpoint would "
                "miss it; use an optimizer that keeps its state itself (fully_shard shards any state)"
            )
    strange = next((key for key in optimizer.state if not isinstance(key, torch.Tensor)), None)
    if strange is not None:
        raise CheckpointError(
            f"{kind} keeps {strange!r} outside the state of its parameters, so a checkpoint would miss "
            "it; keep it in a group of the optimizer"
        )
    known = names_by_parameter(model)
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise CheckpointError(
                    f"parameter {number} of group {index} of the optimizer, of shape "
                    f"{tuple(parameter.shape)}, is not part of the model; put it and the model into one "
                    "module, and make the optimizer after sharding the model"
                )


def require_whole(weights: Mapping[str, Any], model: nn.Module) -> None:
    """Raise CheckpointError if the state dict ``weights`` lacks memory, or a trained parameter."""
    for name, value in weights.items():
        if isinstance(value, torch.Tensor) and (is_lazy(value) or value.is_meta):
            what = "has no shape yet" if is_lazy(value) else "is on the meta device"
            raise CheckpointError(
                f"{name} {what}, so it can be neither saved nor loaded; give the model its memory first, "
                "with a forward pass or to_empty()"
            )
    for name, parameter in named_parameters(model, remove_duplicate=False):
        if parameter.requires_grad and name not in weights:
            raise CheckpointError(
                f"{name} is trained, but not in the model's state_dict(); find the code that removes it "
                "(a hook?), because a restore would lose it"
            )


def require_same_model(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless ``saved`` (tensors or their entries) fits the state dict ``here``."""
    for names, lacking in (
        (saved.keys() - here.keys(), "is in the checkpoint, but not in the model"),
        (here.keys() - saved.keys(), "is in the model, but not in the checkpoint"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"{min(names)} {lacking}{more}; {_OPTIONS}")
    for name, value in saved.items():
        if not is_extra_state(name):
            _require_same_tensor(name, value, here[name], "model")


def require_same_groups(saved: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Raise CheckpointError unless the saved optimizer has the same kind and the same groups."""
    groups = saved["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(groups)} parameter groups, but this one has "
            f"{len(optimizer.param_groups)}"
        )
    known = names_by_parameter(model)
    for index, (old, new) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        require_same_kind(old, new, optimizer)
        if not saved["state"]:  # before the first step, the saved groups have no names
            continue
        if len(old["params"]) != len(new["params"]):
            raise CheckpointError(
                f"group {index} of the checkpoint's optimizer has {len(old['params'])} "
                f"parameters, but here it has {len(new['params'])}"
            )
        there = set(old["params"])
        for parameter in new["params"]:
            aliases = known[id(parameter)]
            if there.isdisjoint(aliases):
                raise CheckpointError(
                    f"{aliases[0]} is in group {index} of the optimizer, but in another group in the "
                    "checkpoint; use the same groups as when it was saved"
                )


def require_same_moments(saved: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Raise CheckpointError if the optimizer's state has more entries, or other shapes or types."""
    for name, parameter in named_parameters(model, remove_duplicate=False):
        kept, moments = optimizer.state.get(parameter), saved["state"].get(name)
        if not kept or not moments:
            continue
        if lacking := kept.keys() - moments.keys():
            raise CheckpointError(
                f"{name}: the optimizer keeps {min(lacking)}, which the checkpoint does not have; resume "
                "with the same optimizer and options"
            )
        for key, value in kept.items():
            if isinstance(value, torch.Tensor):
                _require_same_tensor(f"{name}: its {key}", moments[key], value, "optimizer")


def names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its ``id``."""
    names: dict[int, list[str]] = {}
    for name, parameter in named_parameters(model, remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def is_extra_state(name: str) -> bool:
    """Return True for the name of a module's ``get_extra_state``, which may have any type and size."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def require_same_kind(old: Mapping[str, Any], new: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise CheckpointError if a saved group of an optimizer has the options of another kind of optimizer."""
    # Another version of torch may have one option more or fewer; another optimizer has both.
    lacking = _options(optimizer.defaults) - _options(old)
    unknown = _options(old) - _options(new)
    if lacking and unknown:
        raise CheckpointError(
            f"the checkpoint's optimizer had the option {min(unknown)} but not {min(lacking)}, so it was "
            f"not {type(optimizer).__name__}; resume with the same optimizer"
        )


def _options(keys: Collection[str]) -> set[str]:
    return set(keys) - {"params", "param_names", *KERNELS, *_SCHEDULED}


def _require_same_tensor(name: str, saved: Any, here: Any, where: str) -> None:
    if not isinstance(saved, torch.Tensor | TensorEntry) or not isinstance(here, torch.Tensor):
        return
    if tuple(saved.shape) != tuple(here.shape):
        raise CheckpointError(
            f"{name} has shape {tuple(saved.shape)} in the checkpoint, but {tuple(here.shape)} in the "
            f"{where}; {_OPTIONS}"
        )
    old, new = (str(each.dtype).removeprefix("torch.") for each in (saved, here))
    if old != new:
        raise CheckpointError(
            f"{name} is {old} in the checkpoint, but {new} in the {where}; {_OPTIONS}"
        )


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
