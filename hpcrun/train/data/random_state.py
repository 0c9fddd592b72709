"""Random generators on the CPU: seeds from a position, and separate generators for the data."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import get_worker_info

_DEPTH, _OBJECTS = 6, 2000
_LIBRARIES = frozenset(("builtins", "collections", "numpy", "random", "torch", "typing"))
_LONGEST = 100
"""The most values of a container that may hold a generator, such as a list of transforms; more are data."""


def mixed(*numbers: int) -> int:
    """Return a seed of 63 bits that depends on every number; numbers must not be negative."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


def seed_all(seed: int) -> None:
    """Seed the global generators of python, numpy and torch's CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, which also seeds the devices: training uses their generators.
    torch.default_generator.manual_seed(seed)


def states() -> tuple[Any, Any, torch.Tensor]:
    """Return the states of the global generators of python, numpy and torch's CPU."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_states(found: tuple[Any, Any, torch.Tensor]) -> None:
    """Restore the result of :func:`states`."""
    random.setstate(found[0])
    np.random.set_state(found[1])
    torch.set_rng_state(found[2])


@contextmanager
def set_apart() -> Iterator[None]:
    """Run a block that seeds the global CPU generators; restore them afterwards, but not in a worker."""
    before = None if get_worker_info() else states()
    try:
        yield
    finally:
        if before is not None:
            set_states(before)


class OwnRandomness:
    """Separate CPU generators for blocks: they continue from the end of the block before."""

    def __init__(self, *numbers: int) -> None:
        """Seed the generators from ``numbers``."""
        with set_apart():
            seed_all(mixed(*numbers))
            self._states = states()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run a block with these generators in place of the training's."""
        before = states()
        set_states(self._states)
        try:
            yield
        finally:
            self._states = states()
            set_states(before)


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
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            bits.state = type(bits)(seed).state
        elif isinstance(generator, np.random.RandomState):
            generator.seed(seed % 2**32)
        else:
            generator.seed(seed)


def seed_with(seed: int, generators: Sequence[Any]) -> None:
    """Seed the global CPU generators and ``generators``, each differently."""
    seed_all(seed)
    reseed(generators, [mixed(seed, i) for i in range(len(generators))])


def fingerprint(generator: Any) -> int:
    """Return a number of 63 bits for the state of a generator."""
    state: Any
    if isinstance(generator, torch.Generator):
        state = generator.get_state().numpy().tobytes()
    elif isinstance(generator, np.random.Generator):
        state = repr(generator.bit_generator.state).encode()
    elif isinstance(generator, np.random.RandomState):
        state = repr(generator.get_state(legacy=False)).encode()
    else:
        state = repr(generator.getstate()).encode()
    return xxhash.xxh3_64_intdigest(state) >> 1


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator):
        return value.device.type == "cpu" and value is not torch.default_generator
    # random.SystemRandom has no state.
    return isinstance(value, np.random.Generator | np.random.RandomState) or (
        isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
    )


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
