"""Marks of objects: a mark differs if the state of an object has changed, as far as a quick look sees."""

import gc
import inspect
import itertools
import random
import re
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpcrun.checkpoint.state.generators import KINDS, fingerprint

_DEPTH, _ITEMS, _BYTES, _SAMPLED = 8, 40, 1 << 16, 8
_VALUES = (bool, int, float, str, bytes, tuple, Tensor, np.ndarray, np.generic, *KINDS)


def mark_of(value: Any) -> str:
    """Return a short text for the state of ``value``; draws nothing, and advances no iterator."""
    return xxhash.xxh3_64_hexdigest(repr(_mark(value, _DEPTH, set())).encode())


def _mark(value: Any, depth: int, above: set[int]) -> Any:
    if value is None or isinstance(value, bool | int | float | complex):
        return value
    if isinstance(value, str | bytes | bytearray):
        return len(value), value[:100], value[-100:]
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        return str(value.shape), _array(np.asarray(value))
    if isinstance(value, random.SystemRandom):
        return None
    if isinstance(value, KINDS):
        return fingerprint(value)
    if id(value) in above or not depth or isinstance(value, type | types.ModuleType):
        return type(value).__name__
    return [
        _mark(part, depth - 1, above | {id(value)}) if isinstance(part, object) else part
        for part in _parts(value)
    ]


def _tensor(value: Tensor) -> Any:
    place = (tuple(value.shape), value._version)
    if value.device.type != "cpu" or type(value) not in (Tensor, nn.Parameter):
        return place
    if value.nbytes > _BYTES or value.layout is not torch.strided:
        return (*place, value.data_ptr() if value.layout is torch.strided else 0)
    content = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return tuple(value.shape), _array(content.numpy())


def _samples(tensors: list[Tensor]) -> list[float]:
    """Return some numbers of each tensor: a change through ``tensor.data`` leaves its version."""
    found: dict[torch.device, list[Tensor]] = {}
    for one in tensors:
        local = one.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        if local.layout is torch.strided and local.numel() and local.device.type != "meta":
            flat = local.reshape(-1)[:: max(1, local.numel() // _SAMPLED)][:_SAMPLED]
            found.setdefault(local.device, []).append(flat.to(torch.float32))
    # One transfer for each device.
    return [number for parts in found.values() for number in torch.cat(parts).tolist()]


def _array(value: "np.ndarray[Any, Any]") -> Any:
    if value.dtype.hasobject:
        return len(value.reshape(-1))
    flat = value.reshape(-1)
    step = max(1, flat.nbytes // _BYTES)
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(flat[::step]).tobytes())


def _parts(value: Any) -> Iterable[Any]:
    """Return what the state of ``value`` consists of."""
    if isinstance(value, nn.Module):
        return [_samples([*value.parameters(), *value.buffers()])]
    if isinstance(value, torch.optim.Optimizer):
        rates = [group.get("lr") for group in value.param_groups]
        moments = [one for state in value.state.values() for one in state.values()]
        return [*rates, *(one._version if isinstance(one, Tensor) else one for one in moments)]
    if isinstance(value, dict):
        return [len(value), *itertools.chain.from_iterable(_ends(list(value.items())))]
    if isinstance(value, list | tuple | deque):
        return [len(value), *_ends(value)]
    if isinstance(value, set | frozenset):
        return [len(value)]
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        if frame is None:
            return ["ended"]
        # Not the other objects: a context manager has those of the program.
        own = [
            one for one in frame.f_locals.values() if isinstance(one, _VALUES) or is_iterator(one)
        ]
        return [frame.f_lasti, *own]
    if is_iterator(value):
        return [_place(value), *(one for one in gc.get_referents(value) if _may_move(one))]
    if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return []
    return [*getattr(value, "__dict__", {}).values(), *_slots(value)]


def _ends(values: Any) -> list[Any]:
    if len(values) <= 2 * _ITEMS:
        return list(values)
    return [values[i] for i in (*range(_ITEMS), *range(-_ITEMS, 0))]


def _slots(value: Any) -> Iterator[Any]:
    for base in type(value).__mro__:
        names = vars(base).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield getattr(value, name)


def is_iterator(value: Any) -> bool:
    """Return True for an iterator, also one of C such as ``itertools.cycle``."""
    kind = type(value)
    return hasattr(kind, "__next__") and hasattr(kind, "__iter__")


def is_spinner(value: Any) -> bool:
    """Return True for a cycle of characters, such as those of a progress bar or a plot."""
    if type(value) is not itertools.cycle:
        return False
    below, texts = gc.get_referents(value), list[str]()
    for _ in range(3):
        texts += [one for one in below if isinstance(one, str)]
        parts = [one for one in below if isinstance(one, list | tuple) or is_iterator(one)]
        below = [part for one in parts for part in gc.get_referents(one)]
        if any(
            not isinstance(one, str | int | list | tuple) and not is_iterator(one) for one in below
        ):
            return False
    # A text that a cycle has been given as a whole has the characters.
    return bool(texts) and all(len(one) == 1 or not re.search(r"\w\w", one) for one in texts)


def _may_move(value: Any) -> bool:
    return is_iterator(value) or isinstance(value, list | tuple)


def _place(value: Any) -> Any:
    if isinstance(value, itertools.count | itertools.repeat):
        return repr(value)
    hint = getattr(value, "__length_hint__", None)
    return hint() if callable(hint) else None


def reaches(value: Any, wanted: Any, depth: int = 5) -> bool:
    """Return True if an iterator holds an object for which ``wanted`` is true, at a few steps at most."""
    level, seen = [value], {id(value)}
    for _ in range(depth):
        below = []
        for one in level:
            if wanted(one):
                return True
            for part in gc.get_referents(one):
                known = isinstance(
                    part, type | types.ModuleType | types.FunctionType | types.CodeType
                )
                if id(part) not in seen and not known and len(seen) < 2000:
                    seen.add(id(part))
                    below.append(part)
        level = below
    return False


def is_suspended(value: Any) -> bool:
    """Return True for a generator that has begun and not ended."""
    return inspect.getgeneratorstate(value) == inspect.GEN_SUSPENDED
