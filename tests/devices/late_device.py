"""Simulated accelerator: its work happens as late as the program allows.

A tensor of the device ``late`` wraps a tensor of the host. Each operation on it is queued, as on a stream of
a GPU, and runs only when the program waits: for the stream, for an event, or for a number. Until then the
result holds garbage. This is the slowest device that is possible, so a missing synchronization
shows as wrong numbers in every run, not in one of a thousand.

- A copy to the host with ``non_blocking=True`` leaves the old content on the host until the program waits.
- A copy from the host with ``non_blocking=True`` reads the host's memory when it runs, not when it is called.
- An event waits for the work queued before its record, and for nothing else. A time between two events can be
  read only after both.
- Each wait of the host is noted, with its cause and the work that is still queued after it.

It cannot show faults between streams (there is one), of memory that is freed too early (the queue holds every
tensor), of page-locked memory (a copy from pageable memory is asynchronous too, and only counted), or of a
vendor's kernels (the CPU computes). Random numbers are drawn when the work runs.

The device is a tensor subclass with torch's device type for other vendors (PrivateUse1). The seam
(``hpcrun/devices/accelerator.py``) asks torch for events and page-locked memory, which a device written in
Python cannot have; :func:`plugged` replaces these functions.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hpcrun.devices import accelerator

KIND = "late"
GARBAGE = 77
"""Value of memory that the device has not written yet; for floating-point numbers NaN."""

_aten = torch.ops.aten
_READ_BY_HOST = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}


class Queue:
    """The stream of the device: work in order, not yet done.

    ``waits``: cause of each wait of the host, and if it left no work in the queue. ``pageable``: number of
    asynchronous copies from memory that is not page-locked, for which a GPU's driver makes the host wait.
    """

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self._queued = self._done = 0
        self.waits: list[tuple[str, bool]] = []
        self.pageable = 0

    def put(self, work: Callable[[], object]) -> None:
        """Queue ``work``."""
        self._work.append(work)
        self._queued += 1

    @property
    def end(self) -> int:
        """Number of all operations so far."""
        return self._queued

    @property
    def left(self) -> int:
        """Number of operations that are not done."""
        return self._queued - self._done

    def wait(self, cause: str, until: int | None = None) -> None:
        """Do the work up to operation ``until``, for which the host waits; None: all of it."""
        self.finish(until)
        self.waits.append((cause, not self.left))

    def finish(self, until: int | None = None) -> None:
        """Do the work up to operation ``until``; None: all of it."""
        until = self._queued if until is None else until
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            while self._done < until:
                self._done += 1
                self._work.popleft()()


QUEUE = Queue()


class Event:
    """The part of torch's event that hpcrun uses."""

    def __init__(self) -> None:
        self.until = 0

    def record(self) -> None:
        """Wait later for all work that is queued now."""
        self.until = QUEUE.end

    def synchronize(self) -> None:
        """Do the work up to the record."""
        QUEUE.wait("event", self.until)

    def elapsed_time(self, end: "Event") -> float:
        """Return a time; raises RuntimeError if the work before an event is not done, as CUDA does."""
        if max(self.until, end.until) > QUEUE.end - QUEUE.left:
            raise RuntimeError("both events must be completed before calculating elapsed time")
        return 1.0


class Late(torch.Tensor):
    """A tensor of the device; ``host`` holds its values when its work is done."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "Late":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(KIND, 0),
        )
        made.host = host
        return made

    def tolist(self) -> Any:
        """Wait, and return the values; torch refuses it for subclasses."""
        QUEUE.wait("read")
        return self.host.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Late({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """Makes the new tensors of the device, and brings tensors of the host to it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        here = [one for one in pytree.tree_leaves((args, given)) if isinstance(one, Late)]
        device = given.get("device")
        if here or (device is not None and torch.device(device).type == KIND):
            return run(func, args, given)
        return func(*args, **given)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Queue an operation with a tensor of the device, or from which one is made."""
    if func is _aten._to_copy.default:
        return _to_copy(args[0], kwargs)
    if func is _aten.copy_.default:
        return _copy(*args, **kwargs)
    stays = {**kwargs, **({"device": "cpu"} if kwargs.get("device") is not None else {})}
    stays.pop("pin_memory", None)
    host_args, host_kwargs = pytree.tree_map_only(Late, lambda one: one.host, (args, stays))
    if func in _READ_BY_HOST or torch.Tag.data_dependent_output in func.tags:
        QUEUE.wait("read")
        return func(*host_args, **host_kwargs)
    written = _written(func, args, kwargs)
    if written:
        QUEUE.put(lambda: func(*host_args, **host_kwargs))
        return _returned(func, written)
    if func.is_view or func is _aten.detach.default:  # they share memory, and compute nothing
        return pytree.tree_map_only(torch.Tensor, Late, func(*host_args, **host_kwargs))
    results = _blank(func, host_args, host_kwargs)

    def work() -> None:
        made = func(*host_args, **host_kwargs)
        for into, value in zip(pytree.tree_leaves(results), pytree.tree_leaves(made), strict=True):
            if isinstance(into, torch.Tensor):
                into.copy_(value)

    QUEUE.put(work)
    return pytree.tree_map_only(torch.Tensor, Late, results)


def _blank(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return host tensors of garbage for the results of an operation."""
    on_meta = lambda one: torch.empty_strided(  # noqa: E731
        one.shape, one.stride(), dtype=one.dtype, device="meta"
    )
    args, kwargs = pytree.tree_map_only(torch.Tensor, on_meta, (args, kwargs))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "meta"}
    return pytree.tree_map_only(torch.Tensor, _garbage, func(*args, **kwargs))


def _garbage(like: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    if made.dtype is torch.bool:
        return made.fill_(True)
    return made.fill_(float("nan") if made.is_floating_point() else GARBAGE)


def _to_copy(value: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    asked = kwargs.get("device")
    device = value.device if asked is None else torch.device(asked)
    source = value.host if isinstance(value, Late) else value
    into = _garbage(source.to("meta", dtype=kwargs.get("dtype"), copy=True))
    QUEUE.put(lambda: into.copy_(source))
    if not isinstance(value, Late):
        if not kwargs.get("non_blocking"):
            QUEUE.wait("copy")
        elif not hasattr(value, "page_locked"):
            QUEUE.pageable += 1
        return Late(into)
    if device.type == KIND:
        return Late(into)
    if not kwargs.get("non_blocking"):
        QUEUE.wait("copy")
    return into


def _copy(into: torch.Tensor, value: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    target = into.host if isinstance(into, Late) else into
    source = value.host if isinstance(value, Late) else value
    QUEUE.put(lambda: target.copy_(source))
    if not non_blocking and not (isinstance(into, Late) and isinstance(value, Late)):
        QUEUE.wait("copy")
    return into


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation changes in place."""
    schema = func._schema.arguments
    named = dict(zip((one.name for one in schema), args, strict=False)) | kwargs
    changed = (one.name for one in schema if one.alias_info and one.alias_info.is_write)
    return [named[name] for name in changed if name in named]


def _returned(func: Any, written: list[Any]) -> Any:
    count = len(func._schema.returns)
    return (None, written[0])[count] if count < 2 else tuple(written[:count])


def _locked(value: torch.Tensor, *_: object) -> torch.Tensor:
    value.page_locked = True  # type: ignore[attr-defined]
    return value


class _Module:
    """Torch's module of the device type."""

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device: torch.device) -> None:
        pass

    # The device draws from the CPU's generator.

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        pass


def register() -> None:
    """Make torch know the device type; once per process, and for the whole process."""
    _setup_privateuseone_for_python_backend(rename=KIND, backend_module=_Module())


@contextmanager
def plugged() -> Iterator[None]:
    """Put the device behind the seam within the block."""
    with pytest.MonkeyPatch.context() as patch, Device():
        patch.setattr(accelerator, "event", lambda *_, **__: Event())
        patch.setattr(accelerator, "record", lambda event, _: event.record())
        patch.setattr(accelerator, "synchronize", lambda _: QUEUE.wait("device"))
        patch.setattr(accelerator, "synchronize_stream", lambda _: QUEUE.wait("stream"))
        patch.setattr(accelerator, "host_zeros", lambda count, _: torch.zeros(count))
        patch.setattr(accelerator, "peak_memory", lambda _: 0)
        patch.setattr(torch.Tensor, "pin_memory", _locked)
        yield
        QUEUE.finish()
