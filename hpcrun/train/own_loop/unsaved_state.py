"""A line for state that the loop carries from step to step, and that no checkpoint has.

An environment, a random generator, a replay memory, a target network or an iterator that the program has not
passed starts from its beginning after a resume, and the training ends with other weights, without an error.
They live in variables of the functions that call :meth:`hpcrun.train.own_loop.resumable.Resumable.step`. An
object gets the line only if it has changed between two steps.
"""

import gc
import inspect
import io
import itertools
import re
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hpcrun.checkpoint.state.generators import KINDS
from hpcrun.train.data.found_generators import generators_in
from hpcrun.train.own_loop.own_objects import OwnObject
from hpcrun.train.own_loop.state_marks import (
    is_iterator,
    is_spinner,
    is_suspended,
    mark_of,
    reaches,
)

_PASS = "hpcrun.resumable(..., {word}={name})"
_OWN = str(Path(__file__).parents[2])
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_DEPTH, _LONGEST, _MOST, _NAMED = 5, 100, 3000, 3
_SIMULATED = re.compile(r"env|sim|world|game|board|arena|market|system|process|dynamic", re.I)
_MEASURES = re.compile(r"clock|logger|meter|metric|profil|progress|stopwatch|timer", re.I)
_STEERS = re.compile(r"adapt|anneal|coef|control|curricul|sched|scaler|scaling|temper", re.I)
_SHOWS = {"locals", "vars", "eval", "exec", "f_locals", "breakpoint"}
_GYMS = ("gym", "gymnasium", "pettingzoo", "dm_env", "stable_baselines3", "torchrl")
_METRICS = ("torchmetrics", "torcheval", "ignite")
_FILLS = ("add", "append", "push", "store", "insert", "extend", "remember", "put")


class Carried(NamedTuple):
    """An object that may carry state: the expression that names it, and the words for its kind."""

    name: str
    kind: str
    value: Any


class UnsavedState:
    """Look at the variables of the program, in steps that are powers of two.

    Args:
        saved: the objects that checkpoints have, by name.
        loaders: the DataLoaders of the training; generators of their parts are reseeded for each batch.
        remedy: the call that saves a further object, with ``{word}`` and ``{name}``.
    """

    def __init__(
        self, saved: dict[str, Any], loaders: Iterable[Any], *, remedy: str = _PASS
    ) -> None:
        self._objects, self._remedy = saved, remedy
        parts = [
            part
            for one in loaders
            for part in (one, one.dataset, one.collate_fn, one.sampler, one.batch_sampler)
        ]
        exact = [*parts, *generators_in(*parts, *(one.generator for one in loaders))]
        self._saved = {id(one) for one in [*_inside(list(saved.values())), *exact]}
        self._exact = exact  # so that no other object gets their ids
        self._weights = {
            id(tensor)
            for one in saved.values()
            for module in _modules_in(one)
            for tensor in module.parameters()
        }
        self._marks: dict[int, tuple[Any, str]] = {}
        self._named: set[str] = set()
        self._steps = 0

    def step(self, frame: types.FrameType | None, keep: Any) -> str:
        """Return a line about objects that have changed since the last look; empty without such objects.

        Args:
            frame: the frame that calls ``state.step()``.
            keep: the argument of ``state.step()``.
        """
        self._steps += 1
        if self._steps & (self._steps - 1):
            return ""
        frames = list(_frames(frame))
        # Iterators that a DataLoader reads: their position is saved.
        exact = {id(one) for one in _read_by_us()} if self._steps <= 2 else set()
        found = [one for one in self._look(frames, keep, exact) if one.name not in self._named]
        if self._steps <= 2 and not any("islice" in one.f_code.co_names for one in frames):
            found += self._running(exact)
        before, self._marks = self._marks, {}
        changed = []
        for one in found:
            mark = mark_of(one.value)
            old = before.get(id(one.value))
            if old is not None and old[0] is one.value and old[1] != mark:
                changed.append(one)
            elif self._steps < 2 or not is_iterator(one.value):
                self._marks[id(one.value)] = one.value, mark
        changed = list({one.name: one for one in changed}.values())
        if any(isinstance(one.value, KINDS) for one in changed):
            # Those of other loaders, such as that of a validation.
            read = _read_by_loaders()
            changed = [one for one in changed if id(one.value) not in read]
        self._named |= {one.name for one in changed}
        return _line(changed, self._remedy)

    def _look(self, frames: list[types.FrameType], keep: Any, exact: set[int]) -> list[Carried]:
        known = self._saved | exact | {id(one) for one in _inside([keep])}
        look = _Look(known, self._weights)
        variables: list[tuple[str, Any]] = []
        for frame in frames:
            variables += _locals(frame).items()
            shared = {} if _is_module(frame) else frame.f_globals
            variables += [(name, shared[name]) for name in frame.f_code.co_names if name in shared]
        for one in gc.get_objects() if self._steps <= 2 else ():
            if _is_running(one) and id(one) not in exact:
                variables += one.gi_frame.f_locals.items()
        look.into(variables)
        for name, one in self._objects.items():
            for module in _modules_in(one):
                hidden = ("_modules", "_parameters", "_buffers")
                parts = [pair for pair in vars(module).items() if pair[0] not in hidden]
                look.into([(f"{name}.{key}", part) for key, part in parts], own=True)
        kept = _pickled(keep)
        return [one for one in look.found if type(one.value).__name__.encode() not in kept]

    def _running(self, exact: set[int]) -> list[Carried]:
        """Return generators of the program's code that have begun, and cycles, also without a name."""
        found = []
        for one in gc.get_objects():
            if id(one) in exact or not (type(one) is itertools.cycle or _is_running(one)):
                continue
            if type(one) is itertools.cycle and not (is_spinner(one) or reaches(one, _is_ours)):
                found.append(Carried("itertools.cycle(…)", "an iterator", one))
            elif _is_running(one) and not reaches(one, _is_ours):
                place = f"{Path(one.gi_code.co_filename).name}:{one.gi_code.co_firstlineno}"
                found.append(Carried(f"{one.__name__}()", f"a generator function, {place}", one))
        return found


def unsaved_weights(optimizers: dict[str, Any], saved: dict[str, Any]) -> str:
    """Return a line about tensors that an optimizer trains, and that no saved object has; empty without any.

    Args:
        optimizers: those of the training, by name.
        saved: the other objects that checkpoints have, by name.
    """
    known: set[int] = set()
    level = list(saved.values())
    while level:
        one = level.pop()
        if isinstance(one, nn.Module):
            known |= {id(tensor) for tensor in one.parameters()}
        elif isinstance(one, Tensor):
            known.add(id(one))
        elif isinstance(one, dict):
            level += one.values()
        elif isinstance(one, list | tuple):
            level += one
        elif not _is_plain(one) and not isinstance(one, LRScheduler | torch.amp.GradScaler):
            return ""  # its state may have the tensor
    for name, optimizer in optimizers.items():
        for group in getattr(optimizer, "param_groups", ()):
            for tensor in group["params"]:
                if id(tensor) not in known:
                    return (
                        f"{name} trains a tensor of shape {tuple(tensor.shape)} that is in no model=, so no "
                        "checkpoint has it; pass it too: hpcrun.resumable(..., log_alpha=log_alpha)"
                    )
    return ""


class _Look:
    """Search in variables; ``found`` has the objects that may carry state."""

    def __init__(self, known: set[int], weights: set[int]) -> None:
        self.found: list[Carried] = []
        self._known, self._weights = known, weights
        self._seen = set[int]()

    def into(self, variables: list[tuple[str, Any]], *, own: bool = False) -> None:
        """Search in ``variables``; ``own``: attributes of a saved object, where only generators count."""
        level = variables
        for _ in range(_DEPTH):
            below: list[tuple[str, Any]] = []
            for name, value in level:
                if id(value) in self._known or id(value) in self._seen or len(self._seen) > _MOST:
                    continue
                self._seen.add(id(value))
                kind = "" if _is_plain(value) else self._kind(name, value)
                if kind and (not own or isinstance(value, KINDS)):
                    self.found.append(Carried(name, kind, value))
                elif not kind and not own:
                    below += _below(name, value)
            level = below

    def _kind(self, name: str, value: Any) -> str:
        """Return words for an object that may carry state of the training; empty for other objects."""
        kind = type(value)
        shown, package = kind.__name__, kind.__module__.partition(".")[0]
        if isinstance(value, KINDS):
            default = value is torch.default_generator or value is np.random.mtrand._rand
            return "" if default or shown == "SystemRandom" else f"a random generator, {shown}"
        if isinstance(value, nn.Module):
            shared = any(id(tensor) in self._weights for tensor in value.parameters())
            metric = any(one.__module__.startswith(_METRICS) for one in kind.__mro__)
            return "" if shared or metric else f"a module, {shown}"
        if isinstance(value, torch.optim.Optimizer | LRScheduler):
            return f"an optimizer or scheduler, {shown}"
        if isinstance(value, torch.amp.GradScaler):
            return "a GradScaler" if value.is_enabled() else ""
        if isinstance(value, DataLoader | Dataset | Sampler | _BaseDataLoaderIter | io.IOBase):
            return ""
        if is_iterator(value):
            # A number of steps, which many loops keep in an integer.
            if isinstance(value, itertools.count | itertools.repeat) or is_spinner(value):
                return ""
            passive = package in ("csv", "_csv", "tqdm", "rich", "os", "posix", "hpcrun")
            ours = passive or kind is types.GeneratorType or reaches(value, _is_ours)
            return "" if ours else f"an iterator, {shown}"
        if isinstance(value, deque):
            return "a memory, deque" if any(_has_arrays(one) for one in [*value][:3]) else ""
        if any(one.__module__.partition(".")[0] in _GYMS for one in kind.__mro__):
            return f"an environment, {shown}" if hasattr(value, "step") else ""
        if not _is_users_class(kind) or self._holds_saved(value):
            return ""
        if hasattr(value, "patience"):
            return f"a rule to stop, {shown}"
        if _MEASURES.search(shown):
            return ""
        if callable(getattr(value, "state_dict", None)):
            steers = callable(getattr(value, "step", None)) or _STEERS.search(shown)
            return f"an object with state_dict(), {shown}" if steers or not _counts(value) else ""
        if callable(getattr(value, "step", None)) and (
            callable(getattr(value, "reset", None)) or _SIMULATED.search(f"{name} {shown}")
        ):
            return f"an environment, {shown}"
        fills = any(callable(getattr(value, way, None)) for way in _FILLS)
        memory = callable(getattr(value, "sample", None)) and fills
        return f"a memory, {shown}" if memory else ""

    def _holds_saved(self, value: Any) -> bool:
        """Return True for the object around the training: it has the model, or the state of the loop."""
        return any(
            id(part) in self._known and not _is_plain(part)
            for part in getattr(value, "__dict__", {}).values()
        )


def _below(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a variable to search next, by name."""
    if isinstance(value, dict):
        few = value if len(value) <= _LONGEST else {}
        return [(f"{name}[{key!r}]", part) for key, part in list(few.items())]
    if type(value) in (list, tuple, deque):
        return [(f"{name}[{i}]", part) for i, part in enumerate(list(value)[:_LONGEST])]
    if isinstance(value, types.MethodType):
        return [(f"{name}.__self__", value.__self__)]
    if isinstance(value, types.FunctionType):
        if not _is_users(value.__code__.co_filename):
            return []
        names = [one for one in value.__code__.co_names if one in value.__globals__]
        closed = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        inner = [(one, cell.cell_contents) for one, cell in closed if _is_set(cell)]
        return [(one, value.__globals__[one]) for one in names] + inner
    if isinstance(value, nn.Module) or not _is_users_class(type(value)):
        return []
    return [(f"{name}.{key}", part) for key, part in getattr(value, "__dict__", {}).items()]


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable without a value yet
        return False


def _locals(frame: types.FrameType) -> dict[str, Any]:
    """Return the variables of a function or module; empty if the function itself reads all of them."""
    if _is_module(frame):
        return dict(frame.f_globals)
    # Before Python 3.13 the frame keeps one dict, which is also that of locals(): the old values in it would
    # live until the next look, and a program may have kept it.
    if sys.version_info >= (3, 13):
        return dict(frame.f_locals)
    if not _SHOWS.isdisjoint(frame.f_code.co_names):
        return {}
    held = frame.f_locals
    values = dict(held)
    held.clear()
    return values


def _is_module(frame: types.FrameType) -> bool:
    return not frame.f_code.co_flags & inspect.CO_OPTIMIZED


def _is_running(value: Any) -> bool:
    """Return True for a generator of the program's code that has begun and not ended."""
    return (
        type(value) is types.GeneratorType
        and _is_users(value.gi_code.co_filename)
        and is_suspended(value)
    )


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Yield the frames of the program, from ``frame`` outward."""
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _is_users(file: str) -> bool:
    """Return True for a file that belongs neither to hpcrun nor to an installed package."""
    return not file.startswith((_OWN, *_LIBRARIES, "<frozen"))


def _is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if (
        kind.__module__ == "builtins"
        or kind.__module__.partition(".")[0] in sys.builtin_module_names
    ):
        return False
    return kind.__module__ == "__main__" or (isinstance(file, str) and _is_users(file))


def _is_ours(value: Any) -> bool:
    """Return True for what hpcrun iterates, and for a DataLoader's iterator, which has its own check."""
    if isinstance(value, types.GeneratorType):
        return value.gi_code.co_filename.startswith(_OWN)
    return isinstance(value, _BaseDataLoaderIter) or type(value).__module__.startswith("hpcrun.")


def _read_by_us() -> list[Any]:
    """Return the iterators that hpcrun's generators hold, at a few steps at most."""
    level = [
        one
        for one in gc.get_objects()
        if type(one) is types.GeneratorType and one.gi_code.co_filename.startswith(_OWN)
    ]
    found: list[Any] = []
    for _ in range(4):
        level = [part for one in level for part in gc.get_referents(one) if is_iterator(part)]
        found += level
    return found


def _read_by_loaders() -> set[int]:
    """Return the ids of the generators in all DataLoaders and their parts."""
    loaders = [one for one in gc.get_objects() if issubclass(type(one), DataLoader)]
    parts = [
        part
        for one in loaders
        for part in (one.generator, one.dataset, one.collate_fn, one.sampler, one.batch_sampler)
    ]
    own = [part for part in parts if isinstance(part, KINDS)]
    return {id(one) for one in [*own, *generators_in(*parts)]}


def _counts(value: Any, depth: int = 3) -> bool:
    """Return True for an object that holds numbers and texts only, such as a meter."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim == 0
    if _is_plain(value) or isinstance(value, np.generic | torch.device | torch.dtype | Path):
        return True
    several = isinstance(value, list | tuple | set | deque)
    if not depth or not (several or isinstance(value, dict) or hasattr(value, "__dict__")):
        return False
    held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    parts: Iterable[Any] = value if several else held.values()
    return all(_counts(one, depth - 1) for one in itertools.islice(parts, _LONGEST))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(
        value,
        bool | int | float | complex | str | bytes | Tensor | np.ndarray | type | types.ModuleType,
    )


def _has_arrays(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0
    held = (
        vars(value).values()
        if hasattr(value, "__dict__") and not isinstance(value, dict)
        else parts
    )
    return (
        isinstance(held, Iterable)
        and not isinstance(held, str | bytes)
        and any(isinstance(one, Tensor | np.ndarray) for one in held)
    )


def _modules_in(value: Any) -> list[nn.Module]:
    return list(value.modules()) if isinstance(value, nn.Module) else []


def _inside(values: list[Any]) -> Iterator[Any]:
    """Yield ``values``, and the objects in their attributes and items: a checkpoint has all of them."""
    seen = set[int]()
    for _ in range(_DEPTH):
        below: list[Any] = []
        for value in values:
            if id(value) in seen or _is_plain(value):
                continue
            seen.add(id(value))
            yield value
            if isinstance(value, OwnObject):
                below.append(value.value)
            elif isinstance(value, nn.Module):
                yield from value.modules()
            elif isinstance(value, types.FunctionType):
                below += [cell.cell_contents for cell in value.__closure__ or () if _is_set(cell)]
            elif isinstance(value, dict):
                below += list(value.values())[:_LONGEST]
            elif isinstance(value, list | tuple | deque):
                below += list(value)[:_LONGEST]
            else:
                parts = getattr(value, "__dict__", {})
                # A scheduler has its optimizer, which may not be saved.
                kind = LRScheduler if isinstance(value, LRScheduler) else object
                below += [part for part in parts.values() if isinstance(part, kind | list)]
        values = below


def _pickled(keep: Any) -> bytes:
    """Return the bytes in ``keep``, which may be pickled objects."""
    if isinstance(keep, bytes):
        return keep
    items = keep.values() if isinstance(keep, dict) else keep
    return b"".join(map(_pickled, items)) if isinstance(items, list | tuple) else b""


def _line(changed: list[Carried], remedy: str) -> str:
    if not changed:
        return ""
    shown = ", ".join(f"{one.name} ({one.kind})" for one in changed[:_NAMED])
    more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
    given = [one for one in changed if not is_iterator(one.value)]
    remedies = []
    if given:
        word = re.sub(r"\W+", "_", given[0].name.removeprefix("self.")).strip("_")
        remedies.append(f"pass such objects too: {remedy.format(word=word, name=given[0].name)}")
    if len(given) < len(changed):
        remedies.append(
            "an iterator starts again after a resume: iterate state.batches(loader) of a DataLoader, or an "
            "object with state_dict() that you pass"
        )
    return (
        f"{shown}{more}: changes from step to step, and no checkpoint has it, so a resume may end with other "
        f"weights; {'; '.join(remedies)} (docs/own-loop.md)"
    )
