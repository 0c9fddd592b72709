"""Random generators in objects of the user, found through attributes and code."""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from hpcrun.checkpoint.state.generators import KINDS, mixed, seed_cpu, seed_generator

_DEPTH, _OBJECTS = 6, 2000
_LIBRARIES = frozenset(("builtins", "collections", "numpy", "random", "torch", "typing"))
_LONGEST = 100
"""The most values of a container that may hold a generator, such as a list of transforms; more are data."""


def generators_in(*objects: Any) -> list[Any]:
    """Return the generators in the attributes of ``objects``, also of their parts: transforms, lists, dicts.

    Then follow those that their code names: global variables and attributes of classes, also of functions
    that the code calls. A generator is a ``torch.Generator`` of the CPU, ``random.Random``, or ``Generator``
    or ``RandomState`` of numpy.
    """
    seen: set[int] = set()
    found, values = _search(list(objects), _parts, seen)
    code = [part for value in values for part in _code_of(value)]
    return found + _search(code, _named_in, seen)[0]


def _search(
    level: list[Any], parts: Callable[[Any], list[Any]], seen: set[int]
) -> tuple[list[Any], list[Any]]:
    """Return the generators in ``level`` and the ``parts`` of it, and the other values on the way."""
    found: list[Any] = []
    others: list[Any] = []
    most = len(seen) + _OBJECTS
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in level:
            if id(value) in seen or len(seen) > most:
                continue
            seen.add(id(value))
            if _is_generator(value):
                found.append(value)
            else:
                below += parts(value)
                others.append(value)
        level = below
    return found, others


def reseed(generators: Sequence[Any], seeds: Sequence[int]) -> None:
    """Seed each of ``generators`` in place with its seed, if it has one."""
    for generator, seed in zip(generators, seeds, strict=False):
        seed_generator(generator, seed)


def seed_with(seed: int, generators: Sequence[Any]) -> None:
    """Seed the global CPU generators and ``generators``, each differently."""
    seed_cpu(seed)
    reseed(generators, [mixed(seed, i) for i in range(len(generators))])


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu" and value is not torch.default_generator
    # random.SystemRandom has no state.
    return isinstance(value, KINDS) and not isinstance(value, random.SystemRandom)


def _parts(value: Any) -> list[Any]:
    """Return the values in the attributes of ``value``, and in a short container or a closure."""
    if isinstance(value, Mapping):
        return list(value.values()) if len(value) <= _LONGEST else []
    if isinstance(value, list | tuple):
        return list(value) if len(value) <= _LONGEST else []
    if isinstance(value, type | ModuleType | torch.Tensor | np.ndarray):
        return []
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, FunctionType):
        return _contents(value.__closure__ or ())
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def _code_of(value: Any) -> list[Any]:
    """Return the parts of the user's code in a function, or in the classes of an object."""
    if isinstance(value, FunctionType):
        return _named_in(value)
    classes = [
        one for one in type(value).__mro__ if one.__module__.partition(".")[0] not in _LIBRARIES
    ]
    return [part for one in classes for part in vars(one).values()]


def _named_in(value: Any) -> list[Any]:
    """Return the functions and generators that a function names."""
    value = getattr(value, "__func__", getattr(value, "__wrapped__", value))
    if not isinstance(value, FunctionType):
        return []
    names = [value.__globals__.get(name) for name in value.__code__.co_names]
    named = [*names, *_contents(value.__closure__ or ()), *(value.__defaults__ or ())]
    named += (value.__kwdefaults__ or {}).values()
    return [one for one in named if isinstance(one, FunctionType) or _is_generator(one)]


def _contents(cells: Sequence[CellType]) -> list[Any]:
    found = []
    for cell in cells:
        with suppress(ValueError):  # a variable without a value yet
            found.append(cell.cell_contents)
    return found
