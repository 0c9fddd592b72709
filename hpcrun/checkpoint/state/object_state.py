"""State of an object of the user's as plain data, and back: what a function or an object keeps between steps.

An object with ``state_dict()`` and ``load_state_dict()`` gives its state itself. Of other objects of Python
classes the attributes are the state, and of a function the variables of its closure and the containers that
it reads from its module. Objects that no checkpoint can hold are refused. Process groups, streams, modules,
files and threads are skipped: the program makes them again. So are numbers and texts that no code of the
function assigns, as in a configuration.
"""

import contextvars
import datetime
import decimal
import dis
import enum
import fractions
import functools
import io
import logging
import pathlib
import queue
import random
import socket
import subprocess
import threading
import types
import uuid
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpcrun.checkpoint.state.assignments import (
    EVERYTHING,
    ITEMS,
    assigned_through,
)
from hpcrun.checkpoint.state.generators import KINDS, generator_state, set_generator_state
from hpcrun.checkpoint.state.made_values import (
    made_generator,
    made_object,
    made_tuple,
    made_value,
    require_here,
    type_name,
    value_state,
)
from hpcrun.storage.errors import CheckpointError

_KIND = "\0kind"
CONSTANT = {_KIND: "constant"}
"""Means a value that the program makes again."""
_PLAIN = (type(None), bool, int, float, str, bytes)
_MADE_AGAIN: tuple[Any, ...] = (
    *(type, types.ModuleType, enum.Enum, logging.Logger, weakref.ReferenceType, np.dtype),
    *(torch.dtype, torch.device, torch.layout, torch.Size, torch.Stream, torch.Event),
    *(dist.ProcessGroup, dist.ReduceOp, types.BuiltinFunctionType, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, torch._ops.OpOverload, torch._ops.OpOverloadPacket),
    *(types.GenericAlias, types.EllipsisType, types.MappingProxyType, range, slice),
    *(contextvars.ContextVar, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(pathlib.PurePath, decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(io.IOBase, threading.Thread, socket.socket, subprocess.Popen, queue.Queue),
)
_RECORDERS = frozenset(
    {
        *("aim", "clearml", "comet_ml", "logging", "loguru", "mlflow", "neptune", "rich"),
        *("swanlab", "tensorboard", "tensorboardX", "tqdm", "wandb"),
        *("omegaconf", "pydantic"),
    }
)
"""Packages of objects that record a training, or configure it; the program makes them again."""
# Py_TPFLAGS_HEAPTYPE: a class that a class statement, or an extension, has made.
_HEAP_TYPE = 1 << 9
_STORES = {"STORE_DEREF", "STORE_GLOBAL"}
_MISSING = object()


@dataclass(frozen=True)
class ObjectStates:
    """Captures and restores the state of objects.

    Attributes:
        known: the ids of objects that the checkpoint holds already.
        device: where to put tensors that do not exist yet, if they were on a device of this type.
        complete: the objects are no functions with their configuration, but data of the training, such as an
            environment. Values that cannot change are saved too, files and processes are refused, and a
            restore makes objects that do not exist yet.
    """

    known: frozenset[int]
    device: torch.device
    complete: bool = False

    def take(
        self,
        value: Any,
        where: str,
        above: tuple[int, ...] = (),
        assigned: frozenset[str] | None = None,
    ) -> Any:
        """Return the state of ``value``: plain data and copies of tensors on the CPU.

        Args:
            where: a name of ``value``, for messages.
            above: the ids of the objects that contain ``value``.
            assigned: what the code of the function around ``value`` assigns; None: there is no function, and
                everything is state.

        Raises:
            CheckpointError: a part can neither be saved nor skipped; the text says where.
        """
        if type(value) in _PLAIN:
            return value
        # The program makes the reference to an object above again.
        if id(value) in above or id(value) in self.known:
            return CONSTANT
        if self.complete:
            require_here(value, where)
            if (kept_value := value_state(value)) is not None:
                return {_KIND: "value", "value": kept_value}
        if _is_made_again(value):
            return CONSTANT
        above = (*above, id(value))
        take = functools.partial(self.take, above=above, assigned=assigned)
        whole = assigned is None or not assigned.isdisjoint((ITEMS, EVERYTHING))
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            kept = value.detach().to("cpu", copy=True)
            return {_KIND: "tensor", "value": kept, "device": value.device.type}
        if isinstance(value, dict):
            return _dict_state(value, where, take, whole=whole)
        if isinstance(value, set | frozenset):
            items = sorted(value, key=repr)
            _require_keys(items, where)
            return {_KIND: "set", "value": items} if whole else CONSTANT
        if isinstance(value, tuple | list | deque):
            items = [take(child, f"{where}[{i}]") for i, child in enumerate(value)]
            if not whole and all(map(_is_constant, value, items)):
                return CONSTANT
            if type(value) not in (tuple, list, deque) and isinstance(value, tuple):
                return {_KIND: "named", "value": items, "type": type_name(type(value))}
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, complex):
            return {_KIND: "complex", "value": (value.real, value.imag)}
        if isinstance(value, KINDS):
            return {_KIND: _kind_of(value), "value": generator_state(value)}
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            return {_KIND: "array", "value": torch.from_numpy(np.array(value))}
        if isinstance(value, Optimizer) and not self.complete:
            raise CheckpointError(
                f"{where} is a {type(value).__name__}, which would take its steps in the backward pass, and "
                "a checkpoint would miss its state; step the optimizer in the loop"
            )
        if isinstance(value, functools.partial | types.FunctionType | types.MethodType):
            assigned = assigned_through(value) | (assigned or frozenset())
            parts = {
                name: self.take(part, f"{where}: {name}", above, assigned)
                for name, part in _parts_of(value).items()
            }
            parts = {name: part for name, part in parts.items() if part != CONSTANT}
            return {_KIND: "function", "value": parts} if parts else CONSTANT
        if _stateful(value):
            return {_KIND: "state", "value": self.take(value.state_dict(), where, above)}
        if assigned is not None:
            assigned |= assigned_through(value)
        if not _of_python(value):
            raise CheckpointError(
                f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a "
                "checkpoint cannot hold; keep tensors, numbers, lists and dicts, or define "
                "state_dict() and load_state_dict()"
            )
        attributes = {
            name: self.take(part, f"{where}.{name}", above, assigned)
            for name, part in _attributes(value).items()
            if not _is_number(part)
            or assigned is None
            or not assigned.isdisjoint((name, EVERYTHING))
        }
        attributes = {name: part for name, part in attributes.items() if part != CONSTANT}
        if not attributes and not self.complete:
            return CONSTANT
        return {_KIND: "attributes", "value": attributes, "type": type_name(type(value))}

    def put(self, live: Any, saved: Any) -> Any:
        """Restore a result of :meth:`take` into ``live``, and return the value to use.

        Raises:
            Exception: ``live`` is another object than the object that gave the state.
        """
        if type(saved) is tuple:
            known = live if isinstance(live, tuple) and len(live) == len(saved) else ()
            return tuple(self._items(known, saved))
        if type(saved) is list:
            items = self._items(live if isinstance(live, list | deque) else (), saved)
            if not isinstance(live, list | deque):
                return items
            live.clear()
            live.extend(items)
            return live
        if type(saved) is not dict:
            return saved
        if _KIND in saved:
            return self._restored(live, saved)
        filled = {key: self.put(_get(live, key), part) for key, part in saved.items()}
        return _refilled(live if isinstance(live, dict) else {}, filled)

    def _items(self, live: Any, saved: Any) -> list[Any]:
        known = [*live, *[_MISSING] * len(saved)]
        return [self.put(here, part) for here, part in zip(known, saved, strict=False)]

    def _restored(self, live: Any, saved: dict[str, Any]) -> Any:
        kind = saved[_KIND]
        value: Any = saved.get("value")
        if kind == "tensor":
            return self._tensor(live, saved)
        if kind == "array":
            return _array(live, value)
        if kind == "complex":
            return complex(*value)
        if kind == "dict":
            filled = {key: self.put(_get(live, key), part) for key, part in value}
            return _refilled(live if isinstance(live, dict) else {}, filled)
        if kind == "set":
            if not isinstance(live, set):
                return type(live)(value) if isinstance(live, frozenset) else set(value)
            live.clear()
            live.update(value)
            return live
        if kind == "value":
            return made_value(value)
        if self.complete:
            live = _made(live, saved)
        if live is _MISSING:
            raise CheckpointError(f"a {kind} is in the checkpoint, and the program has not made it")
        if kind in ("generator", "numpy", "random"):
            set_generator_state(live, value)
        elif kind == "named":
            items = self._items(() if live is None else live, value)
            return made_tuple(saved["type"], items) if self.complete else type(live)(*items)
        elif kind == "items":
            for key, part in value:
                live[key] = self.put(live.get(key, _MISSING), part)
        elif kind == "state":
            live.load_state_dict(self.put(_MISSING, value))
        elif kind == "attributes":
            for name, part in value.items():
                here = getattr(live, name, _MISSING)
                if part == CONSTANT or (isinstance(here, _MADE_AGAIN) and not self.complete):
                    continue
                there = self.put(here, part)
                if there is not here:
                    _set_attribute(live, name, there)
        elif kind == "function":
            parts = _parts_of(live)
            for name, part in value.items():
                _set_part(live, name, self.put(parts[name], part))
        return live

    def _tensor(self, live: Any, saved: dict[str, Any]) -> Tensor:
        value: Tensor = saved["value"]
        if isinstance(live, Tensor) and (live.shape, live.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                return live.copy_(value)
        kind = saved["device"]
        return value.to(self.device if kind == self.device.type else kind, copy=True)


def _made(live: Any, saved: dict[str, Any]) -> Any:
    """Return ``live``, or a new object if the program has not made the object of ``saved``."""
    kind = saved[_KIND]
    if kind in ("generator", "numpy", "random") and (live is _MISSING or live is None):
        return made_generator(kind, saved["value"])
    if kind == "attributes" and type_name(type(live)) != saved["type"]:
        return made_object(saved["type"])
    return () if kind == "named" and live is _MISSING else live


def _is_number(value: Any) -> bool:
    """Return True for a number or text, which changes only if code assigns its name."""
    return type(value) in _PLAIN or isinstance(value, complex | np.generic)


def _is_constant(value: Any, taken: Any) -> bool:
    return _is_number(value) or (type(taken) is dict and taken == CONSTANT)


def _is_made_again(value: Any) -> bool:
    if isinstance(value, _MADE_AGAIN):
        return True
    kinds = type(value).__mro__[:-1]
    return any(
        kind.__module__.partition(".")[0] in _RECORDERS
        or kind.__module__.startswith("torch.utils.tensorboard")
        for kind in kinds
    )


def _dict_state(value: dict[Any, Any], where: str, take: Any, *, whole: bool) -> Any:
    """Return the state of a dict; without ``whole``, only that of items which may change in place."""
    if not whole:
        items = [
            (key, one)
            for key, child in value.items()
            if not _is_constant(child, one := take(child, f"{where}[{key!r}]"))
        ]
        if items:
            _require_keys([key for key, _ in items], where)
        return {_KIND: "items", "value": items} if items else CONSTANT
    _require_keys(value, where)
    found = {key: take(child, f"{where}[{key!r}]") for key, child in value.items()}
    if all(type(key) in _PLAIN for key in found):
        return found
    return {_KIND: "dict", "value": list(found.items())}


def _require_keys(keys: Iterable[Any], where: str) -> None:
    for key in keys:
        inner = key if type(key) is tuple else (key,)
        if not all(type(one) in (*_PLAIN, torch.dtype) for one in inner):
            raise CheckpointError(
                f"{where} has a key of type {type(key).__name__}, which a checkpoint cannot hold; "
                "use numbers or text, such as the index of a bucket"
            )


def _get(live: Any, key: Any) -> Any:
    return live.get(key, _MISSING) if isinstance(live, dict) else _MISSING


def _refilled(live: dict[Any, Any], filled: dict[Any, Any]) -> dict[Any, Any]:
    live.clear()
    live.update(filled)
    return live


def _array(live: Any, value: Tensor) -> Any:
    """Return the array, in its old memory if this fits; a number of numpy has no dimension."""
    saved = value.numpy()
    if isinstance(live, np.ndarray) and (live.shape, live.dtype) == (saved.shape, saved.dtype):
        if not live.flags.writeable:
            return saved.copy()
        live[...] = saved
        return live
    return saved.copy() if saved.ndim or isinstance(live, np.ndarray) else saved[()]


def _set_attribute(live: Any, name: str, value: Any) -> None:
    try:
        setattr(live, name, value)
    except AttributeError:  # a frozen dataclass
        object.__setattr__(live, name, value)


def name_of(function: Any) -> str:
    """Return a readable name of a function, with the functions that it wraps in parentheses."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    name = getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]
    inner = [
        name_of(part)
        for key, part in _parts_of(function).items()
        if key.startswith("variable ") and callable(part) and not isinstance(part, type | nn.Module)
    ]
    return f"{name}({', '.join(inner)})" if inner else name


def _parts_of(function: Any) -> dict[str, Any]:
    """Return what a function may keep between calls, by name."""
    if isinstance(function, functools.partial):
        parts = {"function": function.func, "arguments": function.args}
        return parts | {f"argument {name}": one for name, one in function.keywords.items()}
    if isinstance(function, types.MethodType):
        return {"object": function.__self__} | _parts_of(function.__func__)
    if not isinstance(function, types.FunctionType):
        return {}
    names, stored = _names(function.__code__)
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if name in stored or not _is_number(value):
            found[f"variable {name}"] = value
    if function.__module__.partition(".")[0] == "torch":
        return found
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if name in stored or _may_be_state(value, function.__module__):
            found[f"global {name}"] = value
    return found


def _may_be_state(value: Any, module: str) -> bool:
    """Return True for a global of a function in ``module`` that may change between calls."""
    if isinstance(value, types.FunctionType):
        return value.__module__ == module
    generators = (torch.Generator, np.random.Generator, np.random.RandomState)
    if isinstance(value, (Tensor, dict, list, deque, *generators)):
        return True
    if isinstance(value, nn.Module | Optimizer | types.ModuleType | type):
        return False
    return type(value).__module__ == module and _of_python(value)


def _set_part(function: Any, name: str, value: Any) -> None:
    """Assign ``value`` to a variable of ``function``; every other part was filled in place."""
    kind, _, key = name.partition(" ")
    if isinstance(function, types.MethodType):
        function = function.__func__
    if kind == "variable":
        place = function.__code__.co_freevars.index(key)
        function.__closure__[place].cell_contents = value
    elif kind == "global":
        function.__globals__[key] = value


def _names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Return the names that ``code`` uses, with its inner functions, and the variables that it assigns."""
    names = set(code.co_names)
    stored = {one.argval for one in dis.get_instructions(code) if one.opname in _STORES}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more, assigned = _names(inner)
            names, stored = names | more, stored | assigned
    return names, stored


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of a Python class, also those in ``__slots__``."""
    slots = (getattr(base, "__slots__", ()) for base in type(value).__mro__)
    names: Iterator[str] = (
        name for one in slots for name in ([one] if isinstance(one, str) else one)
    )
    found = {
        name: getattr(value, name)
        for name in names
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    }
    return found | getattr(value, "__dict__", {})


def _of_python(value: Any) -> bool:
    bases = [base for base in type(value).__mro__ if base not in (object, types.SimpleNamespace)]
    if isinstance(value, types.SimpleNamespace) and not bases:
        return True
    return bool(bases) and all(
        base.__flags__ & _HEAP_TYPE and not base.__module__.startswith(("torch._C", "numpy"))
        for base in bases
    )


def _kind_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return "generator"
    return "random" if isinstance(generator, random.Random) else "numpy"


def _stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )
