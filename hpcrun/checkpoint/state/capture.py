"""Capture and restore of the training state.

The captured state is tensors and plain data, so that a checkpoint loads with ``weights_only`` and runs no
code. Names are canonical, without the prefixes of wrappers (``module.`` of DDP, ``_orig_mod.`` of a compiled
module), so that a checkpoint does not depend on the strategy of training.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpcrun.checkpoint.state.compatibility import (
    KERNELS,
    is_extra_state,
    require_same_groups,
    require_same_model,
    require_same_moments,
    require_saveable,
    require_whole,
)
from hpcrun.checkpoint.state.tree import bare, join, named_parameters
from hpcrun.storage.errors import CheckpointError
from hpcrun.storage.index import TensorEntry

_LEAVES = (type(None), bool, int, float, str, bytes)
# Bits of an integer that `weights_only` reads again (pickle's LONG1 has 255 bytes, one bit is the sign).
_LONGEST = 2039
_MAPPINGS = (dict, OrderedDict, Counter)
_EXACT = (float, Integral)


def capture_shared(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scaler: Any = None,
    scheduler: Any = None,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """Return the state that all ranks share: references and this rank's shards, no copies.

    Args:
        scaler: a ``GradScaler``, or any object with ``state_dict()``, or None.
        scheduler: a scheduler, or any object with ``state_dict()``, or None.
        extra: step, data position, counters …: plain data and tensors.

    Returns:
        The keys ``model``, ``optimizer``, ``scaler``, ``scheduler`` and ``extra``.

    Raises:
        CheckpointError: a value is neither a tensor nor plain data, or could not be restored; the text
            says where.
    """
    options = StateDictOptions()
    model = bare(model)
    require_saveable(model, optimizer)
    try:
        weights = get_model_state_dict(model, options=options)
        require_whole(weights, model)
        shared = {
            "model": weights,
            "optimizer": _capture_optimizer(model, optimizer, options),
            "scaler": None if scaler is None else scaler.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "extra": extra,
        }
    except ValueError as error:
        raise CheckpointError(f"the state cannot be saved: {error}") from error
    shared = {key: plain(value, key) for key, value in shared.items()}
    for name, value in weights.items():
        if isinstance(value, torch.Tensor) and _overlaps(value):
            raise CheckpointError(
                f"{name}: its elements share memory (expand), so it cannot be loaded; "
                "give it separate memory with .clone()"
            )
    return shared


def alike(model: nn.Module) -> Callable[[str], bool]:
    """Return a function: True for names of tensors that are the same on all data-parallel ranks.

    This holds for parameters, their averages and their optimizer state. Buffers may differ: the batch norm
    of each rank sees other samples.
    """
    names = {f"model/{name}" for name, _ in named_parameters(model, remove_duplicate=False)}
    return lambda name: name in names or name.startswith(("optimizer/state/", "ema/"))


def template(
    model: nn.Module, optimizer: Optimizer
) -> Callable[[Mapping[str, TensorEntry], Any], dict[str, Any]]:
    """Return a function that gives the tensors to load into: the model's, and the optimizer's if saved.

    torch creates the state of a new optimizer by a step with zero gradients. A training run from step 0 must
    not make this step, so the state is created only if there is a state to load. The returned function raises
    CheckpointError for a checkpoint of another training run, and leaves this one unchanged.
    """
    model = bare(model)

    def tensors(entries: Mapping[str, TensorEntry], skeleton: Any) -> dict[str, Any]:
        saved = join({key: skeleton[key] for key in ("model", "optimizer")}, entries)
        return _require_fit(saved, model, optimizer)

    return tensors


def apply_shared(
    shared: dict[str, Any],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scaler: Any = None,
    scheduler: Any = None,
) -> dict[str, Any]:
    """Restore the result of :func:`capture_shared` on every rank, and return its ``extra``.

    Raises:
        CheckpointError: the state belongs to another model or optimizer; the text names a difference.
    """
    model = bare(model)
    _require_fit(shared, model, optimizer)
    # A whole state is split into shards; a sharded or an unsharded model takes its tensors directly.
    whole = not any(isinstance(value, DTensor) for value in shared["model"].values())
    sharded = whole and any(isinstance(parameter, DTensor) for parameter in model.parameters())
    options = StateDictOptions(full_state_dict=sharded, strict=False)
    try:
        # The optimizer comes first: torch lets a new optimizer make a step with zero gradients to create
        # its state, and the load of the model must be the last change of the weights.
        _apply_optimizer(shared["optimizer"], model, optimizer, options)
        weights = dict(shared["model"])  # a copy: torch renames the keys in place
        # Not strict: all trained parameters are present (see `capture_shared`), and the model itself
        # creates everything else that it omits from its state dict.
        strange = set_model_state_dict(model, weights, options=options).unexpected_keys
        if strange:
            raise CheckpointError(
                f"{strange[0]} is in the model's state_dict(), but its load_state_dict() does not accept it"
            )
        for name, part in (("scaler", scaler), ("scheduler", scheduler)):
            if part is not None and shared[name]:  # a disabled scaler has no state
                part.load_state_dict(shared[name])
    except (RuntimeError, ValueError, KeyError) as error:
        text = " ".join(str(error).split())[:500] or type(error).__name__
        raise CheckpointError(f"the checkpoint does not fit this training run: {text}") from error
    extra: dict[str, Any] = shared["extra"]
    return extra


def left_out(shared: dict[str, Any], *, scaler: Any = None, scheduler: Any = None) -> list[str]:
    """Return a line for each part with a state only in the checkpoint, or only in this training run."""
    notes = []
    for name, part in (("scaler", scaler), ("scheduler", scheduler)):
        here = part is not None and bool(part.state_dict())
        if here and not shared[name]:
            notes.append(f"the checkpoint has no state of a {name}; it starts new at this step")
        if shared[name] and part is None:
            notes.append(
                f"the checkpoint's state of a {name} is not used; this training run has none"
            )
    return notes


def _capture_optimizer(
    model: nn.Module, optimizer: Optimizer, options: StateDictOptions
) -> dict[str, Any]:
    # torch initializes an empty state by a step with zero gradients. Adam counts this step, and SGD sets
    # its momentum: a capture before the first step would change training.
    if not optimizer.state:
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        return {"state": {}, "param_groups": groups}
    return get_optimizer_state_dict(model, optimizer, options=options)


def _require_fit(
    saved: Mapping[str, Any], model: nn.Module, optimizer: Optimizer
) -> dict[str, Any]:
    """Return the tensors to load a state like ``saved`` into; ``saved`` has tensors or their entries.

    Raises CheckpointError if the state does not fit, and leaves model and optimizer unchanged.
    """
    weights = get_model_state_dict(model)
    require_saveable(model, optimizer)
    require_whole(weights, model)
    require_same_model(saved["model"], weights)
    require_same_groups(saved["optimizer"], model, optimizer)
    found = {name: value for name, value in weights.items() if not is_extra_state(name)}
    if not saved["optimizer"]["state"]:
        return {"model": found}
    fresh = not optimizer.state
    try:
        state = _give_state(model, optimizer)
        require_same_moments(saved["optimizer"], model, optimizer)
    except Exception:
        if fresh:
            optimizer.state.clear()
        raise
    return {"model": found, "optimizer": {"state": state}}


def _give_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state by name; empty if only a real step can create it (LBFGS)."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    # If any gradient exists, torch creates no state, and a later load would have no target.
    members = [member for group in optimizer.param_groups for member in group["params"]]
    gradients = [member.grad for member in members]
    for member in members:
        member.grad = None
    try:
        state: Any = get_optimizer_state_dict(model, optimizer)["state"]
    except Exception:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise
        # The optimizer needs a closure, or sparse gradients. Undo the part that torch has done.
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        optimizer.state.clear()
        return {}
    finally:
        for member, gradient in zip(members, gradients, strict=True):
            member.grad = gradient
    return dict(state)


def _apply_optimizer(
    saved: dict[str, Any], model: nn.Module, optimizer: Optimizer, options: StateDictOptions
) -> None:
    groups = saved["param_groups"]
    if not saved["state"]:
        optimizer.state.clear()
        for old, new in zip(groups, optimizer.param_groups, strict=True):
            new.update({key: value for key, value in old.items() if key not in KERNELS})
        return
    # Not strict: a parameter that never had a gradient has no state.
    copied: dict[str, Any] = {
        "state": {name: dict(moments) for name, moments in saved["state"].items()},
        # The choice of kernel belongs to this machine: another device may not support the saved kernel.
        "param_groups": [
            dict(old) | {key: new[key] for key in KERNELS if key in new}
            for old, new in zip(groups, optimizer.param_groups, strict=True)
        ],
    }
    if not optimizer.state:
        # `_give_state` could not create the state by a zero step, so keep torch from trying again.
        optimizer.state[next(iter(model.parameters()))] = {}
    set_optimizer_state_dict(model, optimizer, copied, options=options)
    _keep_types(saved["state"], model, optimizer)


def _keep_types(state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    # torch converts loaded state to the parameter's type: float32 state of bfloat16 weights would lose
    # precision.
    for name, parameter in named_parameters(model, remove_duplicate=False):
        mine = optimizer.state.get(parameter, {})
        for key, value in state.get(name, {}).items():
            loaded = mine.get(key)
            if isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                mine[key] = value.to(loaded.device)


def _overlaps(value: torch.Tensor) -> bool:
    local = value.to_local() if isinstance(value, DTensor) else value
    return any(
        size > 1 and not stride for size, stride in zip(local.shape, local.stride(), strict=True)
    )


def plain(value: Any, where: str = "") -> Any:
    """Return ``value``, tensors and plain data, with plain numbers in place of numpy's.

    Raises:
        CheckpointError: a value is something else; the text says where.
    """
    # Exact types: numpy's float64 is a subclass of float, but pickles as numpy and would not load again.
    kind = type(value)

    def below(key: Any, child: Any) -> Any:
        return plain(child, f"{where}.{key}" if where else str(key))

    if kind in _MAPPINGS:
        for key in value:
            if type(key) not in _LEAVES:
                raise CheckpointError(f"{where}: the key {key!r} is not plain data")
        items = {key: below(key, child) for key, child in value.items()}
        return items if kind is dict else kind(items)
    if kind in (list, tuple):
        return kind(map(below, range(len(value)), value))
    # Not float32: after a resume the training would compute with a Python float, and so in float64.
    if kind.__module__ == "numpy" and (
        isinstance(value, _EXACT) or kind.__name__ in ("bool", "bool_")
    ):
        value = value.item()
    elif not isinstance(value, torch.Tensor) and kind not in _LEAVES:
        raise CheckpointError(
            f"{where}: a {kind.__module__}.{kind.__qualname__} cannot be saved; only tensors, numbers, text, "
            "lists and dictionaries can (float(…) and torch.as_tensor(…) convert values of numpy)"
        )
    if type(value) is int and value.bit_length() > _LONGEST:
        raise CheckpointError(
            f"{where}: an integer of {value.bit_length()} bits cannot be saved; the limit is {_LONGEST} bits"
        )
    return value
