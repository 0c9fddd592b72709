"""Values that a restore makes: immutable values, and objects that the program has not made again.

A checkpoint loads without running code. So it names a class by its module, and a restore takes a class only
from a module that the program has imported.
"""

import datetime
import decimal
import enum
import fractions
import io
import multiprocessing.connection
import multiprocessing.process
import pathlib
import queue
import random
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hpcrun.storage.errors import CheckpointError

_Ways = tuple[Callable[[Any], Any], Callable[[Any], Any]]
_BY_TYPE: dict[type, _Ways] = {
    range: (lambda v: (v.start, v.stop, v.step), lambda v: range(*v)),
    slice: (lambda v: (v.start, v.stop, v.step), lambda v: slice(*v)),
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (str, fractions.Fraction),
    uuid.UUID: (str, uuid.UUID),
    pathlib.PurePosixPath: (str, pathlib.PurePosixPath),
    pathlib.PosixPath: (str, pathlib.Path),
    datetime.date: (lambda v: v.isoformat(), datetime.date.fromisoformat),
    datetime.datetime: (lambda v: v.isoformat(), datetime.datetime.fromisoformat),
    datetime.time: (lambda v: v.isoformat(), datetime.time.fromisoformat),
    datetime.timedelta: (
        lambda v: (v.days, v.seconds, v.microseconds),
        lambda v: datetime.timedelta(*v),
    ),
    bytearray: (bytes, bytearray),
}

_ELSEWHERE: tuple[Any, ...] = (
    *(io.IOBase, threading.Thread, socket.socket, subprocess.Popen, queue.Queue),
    *(multiprocessing.process.BaseProcess, multiprocessing.connection.Connection),
)


def require_here(value: Any, where: str) -> None:
    """Raise CheckpointError if the state of ``value`` is in a file, or in another process or thread."""
    if isinstance(value, _ELSEWHERE) and value not in (sys.stdin, sys.stdout, sys.stderr):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, so the state is in a file, or in another process or "
            "thread, where no checkpoint reaches it; give the object state_dict() and load_state_dict(), or "
            "for environments of gymnasium use SyncVectorEnv"
        )


def value_state(value: Any) -> Any:
    """Return plain data for an immutable value, such as an enum member or a date; None for other values."""
    if isinstance(value, enum.Enum):
        return {"type": type_name(type(value)), "value": value.name}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "SUMm":
        numbers = value.dtype.kind in "Mm"  # dates and times
        return {
            "type": "numpy",
            "value": (
                value.dtype.str,
                np.asarray(value).view("i8").tolist() if numbers else value.tolist(),
            ),
        }
    ways = _BY_TYPE.get(type(value))
    return None if ways is None else {"type": type(value).__name__, "value": ways[0](value)}


def made_value(saved: dict[str, Any]) -> Any:
    """Return the value for a result ``saved`` of :func:`value_state`; raises CheckpointError."""
    name, value = saved["type"], saved["value"]
    if name == "numpy":
        text = np.dtype(value[0]).kind in "SU"
        array = np.array(value[1], dtype=value[0] if text else "i8")
        array = array if text else array.view(value[0])
        return array if array.ndim else array[()]
    for kind, (_, make) in _BY_TYPE.items():
        if kind.__name__ == name:
            return make(value)
    found = type_named(name)
    if not issubclass(found, enum.Enum):
        raise CheckpointError(f"{name} is no enum")
    return found[value]


def type_name(kind: type) -> str:
    """Return the name by which :func:`type_named` finds a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def type_named(name: str) -> type:
    """Return a class of a module that the program has imported.

    Raises:
        CheckpointError: there is no such class.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for word in path.split("."):
        found = getattr(found, word, None)
    if not isinstance(found, type):
        raise CheckpointError(
            f"the checkpoint has an object of the class {name.replace(':', '.')}, and the program has no "
            "such class; define it at the top of a module, and create the object before this call"
        )
    return found


def made_tuple(name: str, items: list[Any]) -> Any:
    """Return a named tuple of ``items``; raises CheckpointError for another class."""
    kind: Any = type_named(name)
    if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        raise CheckpointError(f"{name} is no named tuple")
    return kind(*items)


def made_object(name: str) -> Any:
    """Return an object of a Python class without its attributes; raises CheckpointError."""
    return object.__new__(type_named(name))


def made_generator(kind: str, state: Any) -> Any:
    """Return a new random generator for a ``state`` of ``kind``: of torch's CPU, numpy or python."""
    if kind == "generator":
        return torch.Generator()
    if kind == "random":
        return random.Random()
    name = state["bit_generator"]
    if "has_gauss" in state:
        return np.random.RandomState(getattr(np.random, name)())
    return np.random.Generator(getattr(np.random, name)())
