"""Whether a model and its optimizer can be saved, and whether a checkpoint is theirs.

All of it is asked before a tensor is loaded: a training that is refused stays as it was.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hpcrun.checkpoint.state.names import named_parameters
from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.checkpoint.storage.index import TensorEntry

KERNELS = ("fused", "foreach")
_OPTIONS = "resume with the same model options"
# What schedules leave in an optimizer's groups.
_SCHEDULED = ("initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr")
_EXTRA_STATE = "_extra_state"


def require_saveable(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise CheckpointError where a checkpoint would lack part of the optimizer's state."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise CheckpointError(
            f"optimizer: {kind} is no torch.optim.Optimizer; give one, of the model's parameters"
        )
    for name, inner in vars(optimizer).items():
        if isinstance(inner, Optimizer) and inner.state is not optimizer.state:
            raise CheckpointError(
                f"{kind} keeps its state in its {name} ({type(inner).__name__}), and a checkpoint would "
                "lack it; use an optimizer that keeps it itself (fully_shard shards the state of any)"
            )
    strange = next((key for key in optimizer.state if not isinstance(key, torch.Tensor)), None)
    if strange is not None:
        raise CheckpointError(
            f"{kind} keeps {strange!r} beside the state of its parameters, where a checkpoint would lack "
            "it; keep it in a group of the optimizer"
        )
    known = names_by_parameter(model)
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise CheckpointError(
                    f"parameter {number} of group {index} of the optimizer, of shape "
                    f"{tuple(parameter.shape)}, is in no part of the model; make it one (a module that "
                    "holds both), and the optimizer after the model is sharded"
                )


def require_whole(weights: Mapping[str, Any], model: nn.Module) -> None:
    """Raise CheckpointError where ``weights``, a state dict, lacks memory, or a parameter that is trained."""
    for name, value in weights.items():
        if isinstance(value, torch.Tensor) and (is_lazy(value) or value.is_meta):
            what = "has no shape yet" if is_lazy(value) else "is on the meta device"
            raise CheckpointError(
                f"{name} {what}, and can neither be saved nor loaded; first give the model its memory, "
                "with a forward pass or to_empty()"
            )
    for name, parameter in named_parameters(model, remove_duplicate=False):
        if parameter.requires_grad and name not in weights:
            raise CheckpointError(
                f"{name} is trained, and not in the model's state_dict(): what changes that (a hook?) "
                "must leave it in, or it would not come back"
            )


def require_same_model(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless ``saved``, of tensors or their entries, fits the state dict ``here``."""
    for names, lacking in (
        (saved.keys() - here.keys(), "is in the checkpoint, not in the model"),
        (here.keys() - saved.keys(), "is in the model, not in the checkpoint"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"{min(names)} {lacking}{more}; {_OPTIONS}")
    for name, value in saved.items():
        if not is_extra_state(name):
            _require_same_tensor(name, value, here[name], "model")


def require_same_groups(saved: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Raise CheckpointError unless the saved optimizer was one of this kind, with these groups."""
    groups = saved["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(groups)} parameter groups, this one has "
            f"{len(optimizer.param_groups)}"
        )
    known = names_by_parameter(model)
    for index, (old, new) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        _require_same_kind(old, new, optimizer)
        if not saved["state"]:  # groups of a training without a step have no names
            continue
        if len(old["params"]) != len(new["params"]):
            raise CheckpointError(
                f"group {index} of the checkpoint's optimizer has {len(old['params'])} "
                f"parameters, here it has {len(new['params'])}"
            )
        there = set(old["params"])
        for parameter in new["params"]:
            aliases = known[id(parameter)]
            if there.isdisjoint(aliases):
                raise CheckpointError(
                    f"{aliases[0]} is in group {index} of the optimizer, and in another one of the "
                    "checkpoint's; give its groups the same parameters"
                )


def require_same_moments(saved: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Raise CheckpointError where the optimizer, which has a state, keeps more or other things in it."""
    for name, parameter in named_parameters(model, remove_duplicate=False):
        kept, moments = optimizer.state.get(parameter), saved["state"].get(name)
        if not kept or not moments:
            continue
        if lacking := kept.keys() - moments.keys():
            raise CheckpointError(
                f"{name}: the optimizer keeps {min(lacking)} of it, and the checkpoint's did not; resume "
                "with the same optimizer and options"
            )
        for key, value in kept.items():
            if isinstance(value, torch.Tensor):
                _require_same_tensor(f"{name}: its {key}", moments[key], value, "optimizer")


def names_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its ``id``."""
    names: dict[int, list[str]] = {}
    for name, parameter in named_parameters(model, remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def is_extra_state(name: str) -> bool:
    """Whether this is what a module's ``get_extra_state`` gave: of any kind, and of any size."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def _require_same_kind(
    old: Mapping[str, Any], new: Mapping[str, Any], optimizer: Optimizer
) -> None:
    # Another version of torch may know an option more, or one less; another optimizer has other ones.
    lacking = _options(optimizer.defaults) - _options(old)
    unknown = _options(old) - _options(new)
    if lacking and unknown:
        raise CheckpointError(
            f"the checkpoint's optimizer had the option {min(unknown)} and no {min(lacking)}, and was "
            f"no {type(optimizer).__name__}; resume with the same optimizer"
        )


def _options(keys: Collection[str]) -> set[str]:
    return set(keys) - {"params", "param_names", *KERNELS, *_SCHEDULED}


def _require_same_tensor(name: str, saved: Any, here: Any, where: str) -> None:
    if not isinstance(saved, torch.Tensor | TensorEntry) or not isinstance(here, torch.Tensor):
        return
    if tuple(saved.shape) != tuple(here.shape):
        raise CheckpointError(
            f"{name} has shape {tuple(saved.shape)} in the checkpoint, {tuple(here.shape)} in the "
            f"{where}; {_OPTIONS}"
        )
    old, new = (str(each.dtype).removeprefix("torch.") for each in (saved, here))
    if old != new:
        raise CheckpointError(
            f"{name} is {old} in the checkpoint, {new} in the {where}; {_OPTIONS}"
        )
