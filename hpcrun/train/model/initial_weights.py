"""Initial weights from safetensors files: of another training, or of a published model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpcrun.errors import UserError
from hpcrun.train.task import Task

_KEY = "train.init_from"


def load_initial_weights(model: nn.Module, source: str) -> None:
    """Set the parameters and persistent buffers of ``model`` from a file or a folder of safetensors.

    The files are mapped into memory. Parameters on the meta device stay as they are, and nothing reads their
    tensors.

    Raises:
        UserError: there are no such files, or they do not hold the tensors of the model.
    """
    wanted = initial_state(model)
    sources: dict[str, Path] = {}
    with torch.no_grad():
        for file, name, tensor in _tensors(source):
            if name in sources:
                raise UserError(f"{_KEY}: {name} is in {sources[name]} and in {file}; remove one")
            sources[name] = file
            target = wanted.get(name)
            if target is None:
                raise UserError(f"{_KEY}: {file} has {name}, which the model does not have")
            if target.shape != tensor.shape:
                raise UserError(
                    f"{_KEY}: {name} has the shape {tuple(tensor.shape)} in {file}, and "
                    f"{tuple(target.shape)} in the model"
                )
            target.copy_(tensor)
    # A file holds a tied weight once, under one of its names.
    loaded = {id(wanted[name]) for name in sources}
    missing = [name for name, target in wanted.items() if id(target) not in loaded]
    if missing:
        raise UserError(
            f"{_KEY}: {source} has no {missing[0]} ({len(missing)} tensors are missing)"
        )


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


def _tensors(source: str) -> Iterator[tuple[Path, str, Tensor]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UserError(
            f"{_KEY}: needs the package safetensors: `pip install hpcrun[safetensors]`"
        ) from error
    for file in _files(Path(source)):
        try:
            opened: Any = safe_open(file, framework="pt")
            found = [(name, opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"{_KEY}: {file} cannot be read: {error}") from error
        for name, tensor in found:
            yield file, name, tensor


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    found = sorted(source.glob("*.safetensors"))
    if not found:
        what = "has no file *.safetensors" if source.is_dir() else "does not exist"
        raise UserError(f"{_KEY}: {source} {what}; name a file, or a folder of safetensors")
    return found
