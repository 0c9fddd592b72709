"""Initial weights from safetensors files: of another training, or of a published model."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

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


class LoadedAtUse(TorchFunctionMode):
    """Context that loads the initial weights of a model as soon as anything uses one of its tensors.

    A resume needs no files whose weights its checkpoint replaces. But a task may hold the model anywhere, and
    compute its datasets with it.
    """

    def __init__(self, model: nn.Module, source: str) -> None:
        super().__init__()
        self._model, self._source = model, source
        # The load itself uses the weights.
        self._loaded, self._loading, self._lock = False, False, threading.RLock()
        self._places = {*map(_place, initial_state(model).values())}
        self._parts = {*map(id, model.modules())}
        self._hook: Any = None

    def __enter__(self) -> "LoadedAtUse":
        # The mode is that of one thread; a forward pass is seen in any.
        self._hook = register_module_forward_pre_hook(self._before_pass)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._loaded and any(
            _place(leaf) in self._places
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        ):
            self._load()
        return func(*args, **(kwargs or {}))

    def _before_pass(self, part: nn.Module, _: Any) -> None:
        if id(part) in self._parts:
            self._load()

    def _load(self) -> None:
        with self._lock:
            if self._loaded or self._loading:
                return
            self._loading = True
            try:
                load_initial_weights(self._model, self._source)
                self._loaded = True
            finally:
                self._loading = False


def _place(value: Tensor) -> tuple[str, int]:
    """Return what a tensor has in common with all its views."""
    try:
        return "storage", value.untyped_storage()._cdata
    except RuntimeError:  # a sparse tensor, or one of a class without memory of its own
        return "tensor", id(value)


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
