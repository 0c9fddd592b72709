"""Names that code assigns: they separate what a hook keeps between steps from a configuration that it reads.

A restore must not write the configuration of the run before over that of this run.
"""

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

ITEMS = "[]"
"""Means the items of any dict or list."""
EVERYTHING = "*"
"""Means any name: the code assigns names that its text does not show."""

_MUTATORS = frozenset(
    {
        *("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert"),
        *("move_to_end", "pop", "popitem", "popleft", "remove", "reverse", "rotate", "setdefault"),
        *("sort", "subtract", "update", "__setitem__"),
    }
)
_HIDDEN = frozenset({"setattr", "__setattr__", "exec", "eval"})
_NAMESPACES = frozenset({"__dict__", "vars"})
# torch and numpy change no container of the user's, except in torch's own hooks.
_HARMLESS = ("torch", "numpy", "math", "time", "logging", "contextlib", "functools")
_MOST = 2000
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
# They make an object, show it, or are those of a frozen dataclass.
_MAKERS = ("__init__", "__post_init__", "__new__", "__setstate__", "__repr__")
_FROZEN = ("__setattr__", "__delattr__")


@functools.lru_cache(maxsize=1024)
def assigned_by(code: types.CodeType) -> frozenset[str]:
    """Return the attributes that ``code`` assigns, with its inner functions, and ``ITEMS``."""
    found = set()
    for one in dis.get_instructions(code):
        if one.opname == "STORE_ATTR":
            found.add(one.argval)
        elif one.opname in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            found.add(ITEMS)
    if _MUTATORS.intersection(code.co_names):
        found.add(ITEMS)
    if _HIDDEN.intersection(code.co_names) or (
        ITEMS in found and _NAMESPACES.intersection(code.co_names)
    ):
        found.add(EVERYTHING)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= assigned_by(inner)
    return frozenset(found)


@functools.lru_cache(maxsize=1024)
def methods_of(kind: type) -> tuple[types.FunctionType, ...]:
    """Return the functions of a class that may change its object after it is made."""
    found = []
    for base in kind.__mro__[:-1]:
        if _is_harmless(base.__module__):
            continue
        frozen = getattr(base, "__dataclass_params__", None)
        omitted = (*_MAKERS, *(_FROZEN if frozen is not None and frozen.frozen else ()))
        for name, value in vars(base).items():
            ways = (value.fget, value.fset) if isinstance(value, property) else (value,)
            functions = [getattr(way, "__func__", way) for way in ways if name not in omitted]
            found += [one for one in functions if isinstance(one, types.FunctionType)]
    return tuple(found)


def assigned_through(function: Any) -> frozenset[str]:
    """Return what a function, or the methods of an object, assign, with the functions that they call."""
    found: frozenset[str] = frozenset()
    waiting, seen = [function], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if len(seen) > _MOST:
            return found | {EVERYTHING}
        if isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, types.MethodType):
            waiting += [one.__self__, one.__func__]
        elif isinstance(one, types.FunctionType):
            if not _is_harmless(one.__module__ or ""):
                found |= assigned_by(one.__code__)
                waiting += _called(one)
        elif not isinstance(one, types.ModuleType | type):
            # The function may give its data to a method of this object.
            kind: Any = type(one)
            waiting += methods_of(kind)
    return found


def _is_harmless(module: str) -> bool:
    return module.partition(".")[0] in _HARMLESS and not module.startswith(_HOOKS)


def _called(function: types.FunctionType) -> Iterator[Any]:
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            yield from (vars(value)[one] for one in names & vars(value).keys())
        else:
            yield value
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)
