"""Initial weights of a model from files (``train.init_from``)."""

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from hpcrun.errors import UserError
from hpcrun.train.task import Task

_KEY, _RENAME = "train.init_from", "train.init_rename"
_OF_MODEL = "model."
_GROUP = 1 << 30
"""Bytes of the model's tensors to read at a time."""


def load_initial_weights(
    model: nn.Module, source: str, renames: Mapping[str, str | None] | None = None
) -> None:
    """Set the parameters and persistent buffers of ``model`` from the file or folder ``source``.

    All names and shapes are compared before the first tensor is read. Parameters on the meta device stay as
    they are, and nothing reads their tensors.

    Args:
        renames: the new beginning of names by their old beginning; None: leave these tensors out.

    Raises:
        UserError: there are no such files, or they do not hold the tensors of the model.
    """
    try:
        _load(model, Path(source), renames or {})
    except UserError as error:
        raise UserError(f"{_KEY}: {error}") from error


def _load(model: nn.Module, source: Path, renames: Mapping[str, str | None]) -> None:
    from hpcrun.checkpoint.sharded.copies import in_groups
    from hpcrun.checkpoint.weights import open_weights

    wanted, weights = initial_state(model), open_weights(source)
    names = _renamed(weights.shapes, renames)
    if not weights.whole_model:
        names = _of_the_model(names, wanted)
    _require_fit(names, wanted, source)
    for name, key in names.items():
        if wanted[name].shape != weights.shapes[key]:
            file = weights.files.get(key, weights.source)
            raise UserError(
                f"{name} has the shape {weights.shapes[key]} in {file}, and {tuple(wanted[name].shape)} in "
                "the model"
            )
    sizes = {name: wanted[name].nbytes for name in names if not wanted[name].is_meta}
    # A deferred build calls this on the meta device.
    with torch.no_grad(), torch.device("cpu"):
        for group in in_groups(sizes, _GROUP):
            read = weights.read([names[name] for name in group])
            for name in group:
                wanted[name].copy_(read[names[name]])


def _renamed(names: Collection[str], renames: Mapping[str, str | None]) -> dict[str, str]:
    """Return the names in the file by their names in the model."""
    found: dict[str, str] = {}
    used = set()
    for key in names:
        old = max((old for old in renames if key.startswith(old)), key=len, default=None)
        name: str | None = key
        if old is not None:
            used.add(old)
            new = renames[old]
            name = None if new is None else new + key.removeprefix(old)
        if name in found:
            raise UserError(f"{found[name]} and {key} both become {name}; change {_RENAME}")
        if name is not None:
            found[name] = key
    for old in renames.keys() - used:
        near = difflib.get_close_matches(old, names, n=1, cutoff=0.3)
        hint = f"; one is {near[0]}" if near else ""
        raise UserError(f"{_RENAME}: no tensor of the files begins with {old}{hint}")
    return found


def _of_the_model(names: dict[str, str], wanted: Collection[str]) -> dict[str, str]:
    """Return the names that belong to the model, of a source that also holds other state.

    The model's names begin with ``model.``, or the other state has another first component.
    """
    if names.keys().isdisjoint(wanted):
        inside = {
            name.removeprefix(_OF_MODEL): key
            for name, key in names.items()
            if name.startswith(_OF_MODEL)
        }
        return inside or names
    first = {name.partition(".")[0] for name in wanted}
    return {name: key for name, key in names.items() if name.partition(".")[0] in first}


def _require_fit(names: Collection[str], wanted: Mapping[str, Tensor], source: Path) -> None:
    """Raise UserError with the first name that is missing or that the model lacks, and a remedy."""
    # A file holds a tied weight once, under one of its names.
    loaded = {id(wanted[name]) for name in names if name in wanted}
    missing = [name for name, target in wanted.items() if id(target) not in loaded]
    unknown = [name for name in names if name not in wanted]
    parts = [f"has no {missing[0]} ({len(missing)} tensors are missing)"] if missing else []
    if unknown:
        words = f"has {unknown[0]}, which the model does not have"
        parts.append(words + (f" ({len(unknown)} such tensors)" if len(unknown) > 1 else ""))
    if parts:
        raise UserError(f"{source} {' and '.join(parts)}; {_remedy(missing, unknown)}")


def _remedy(missing: list[str], unknown: list[str]) -> str:
    if missing and unknown:
        for name in unknown:
            if name.endswith(f".{missing[0]}"):
                return f"set {_RENAME}={{'{name.removesuffix(missing[0])}': ''}}"
            if missing[0].endswith(f".{name}"):
                return f"set {_RENAME}={{'': '{missing[0].removesuffix(name)}'}}"
        near = difflib.get_close_matches(missing[0], unknown, n=1)
        if near:
            return f"did you mean {near[0]}? {_RENAME} renames"
    if unknown and not missing:
        return f"leave it out with {_RENAME}={{'{unknown[0]}': null}}"
    return "use the files of this model"


def initial_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by all their names."""
    transient = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    buffers = model.named_buffers(remove_duplicate=False)
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **{name: value for name, value in buffers if name not in transient},
    }


def covers(task: Task, model: nn.Module) -> bool:
    """Return True if a checkpoint of ``model`` replaces all that depends on its initial weights.

    A model may omit some weights from its state dict, such as frozen weights of another model. An optimizer
    of the task's own may keep the weights that it begins with.
    """
    if type(task).build_optimizer is not Task.build_optimizer:
        return False
    try:
        kept = model.state_dict().keys()
    except Exception:  # of any type: code of the model, which may read values
        return False
    return initial_state(model).keys() <= kept
