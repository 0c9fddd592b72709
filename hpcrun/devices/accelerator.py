"""Devices, streams, events, memory and generators, through torch's interfaces for any accelerator.

``torch.accelerator`` exists since torch 2.6, and its statistics of memory since 2.9. Before that, and for
what it lacks, the module of the device type answers (``torch.get_device_module``).
"""

from collections.abc import Mapping
from typing import Any

import torch

from hpcrun.devices import vendor

# Apple's MPS has no process group, no fp64 and no pinned memory.
_HOST = frozenset({"cpu", "meta", "mps"})


class _Kinds:
    """The device types that are accelerators, also those that a library registers later."""

    def __contains__(self, kind: object) -> bool:
        return kind not in _HOST


KINDS = _Kinds()
"""Container of the device types that compute asynchronously and have their own memory."""


def is_accelerator(device: torch.device) -> bool:
    """Return True if ``device`` is neither the CPU, nor Apple's MPS, nor torch's meta device."""
    return device.type in KINDS


def kind() -> str | None:
    """Return the type of the accelerators that torch supports here; None if it supports none."""
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises where newer versions return None
        return None
    return None if found is None or found.type in _HOST else found.type


def is_started() -> bool:
    """Return True if this process has started an accelerator. Starts none, unlike the other functions."""
    modules = (getattr(torch, name, None) for name in (vendor.KIND, "xpu"))
    return any(module is not None and module.is_initialized() for module in modules)


def count() -> int:
    """Return the number of accelerators that this process sees."""
    here = kind()
    return 0 if here is None else int(_module(here).device_count())


def device(index: int) -> torch.device:
    """Return accelerator ``index`` of this process, whether it is visible or not."""
    return torch.device(kind() or vendor.KIND, index)


def default_device() -> torch.device:
    """Return the current accelerator, or the CPU if this process sees none."""
    here = kind()
    return torch.device(here) if here is not None and count() else torch.device("cpu")


def make_current(device: torch.device) -> None:
    """Make ``device``, an accelerator, the current device of this thread."""
    _module(device).set_device(device)


def name(device: torch.device) -> str:
    """Return the vendor's name of the device, for example NVIDIA H100 80GB HBM3."""
    reported = getattr(_module(device), "get_device_name", None)
    return device.type if reported is None else str(reported(device))


def properties(device: torch.device) -> Any:
    """Return the driver's description of the device; None if its module has no such function."""
    reported = getattr(_module(device), "get_device_properties", None)
    return None if reported is None else reported(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work; on the CPU this does nothing."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Wait until the current stream of ``device``, an accelerator, has finished its work."""
    torch.accelerator.current_stream(device).synchronize()


def event(device: torch.device, *, timing: bool = False) -> torch.Event:
    """Make an event of the device; ``timing``: it also measures times."""
    return torch.Event(device, enable_timing=timing)


def record(event: torch.Event, device: torch.device) -> None:
    """Record ``event`` on the current stream of ``device``, which need not be the current device."""
    event.record(torch.accelerator.current_stream(device))


def milliseconds(start: torch.Event, end: torch.Event) -> float:
    """Return the time between two finished events."""
    return float(start.elapsed_time(end))


def host_zeros(count: int, device: torch.device) -> torch.Tensor:
    """Make ``count`` float32 zeros in host memory, page-locked if ``device`` copies to it asynchronously."""
    return torch.zeros(count, pin_memory=is_accelerator(device))


def memory(device: torch.device) -> tuple[int, int]:
    """Return the free and the total bytes of the device."""
    ask = getattr(torch.accelerator, "get_memory_info", None) or _module(device).mem_get_info
    free, total = ask(device)
    return int(free), int(total)


def peak_memory(device: torch.device) -> int:
    """Return the peak of the bytes that tensors of this process had on the device."""
    here = getattr(torch.accelerator, "max_memory_allocated", None)
    return int((here or _module(device).max_memory_allocated)(device))


def profiled(device: torch.device) -> list[torch.profiler.ProfilerActivity]:
    """Return what the profiler records: the CPU, and the accelerator if ``device`` is one."""
    kinds = torch.profiler.ProfilerActivity
    if not is_accelerator(device):
        return [kinds.CPU]
    return [kinds.CPU, getattr(kinds, device.type.upper(), kinds.PrivateUse1)]


def generator_states() -> dict[str, Any] | None:
    """Return the states of the generators of all accelerators that this process sees.

    Returns:
        The type of the accelerators, and the states as uint8 tensors: that of the current device first, then
        those of the following devices, so that the order has a meaning on another node. None if this process
        has used no accelerator.
    """
    here = kind()
    if here is None or not count():
        return None
    module = _module(here)
    if not getattr(module, "is_initialized", module.is_available)():
        return None
    return {"kind": here, "states": [module.get_rng_state(one) for one in _from_current(here)]}


def restore_generators(saved: Mapping[str, Any]) -> str | None:
    """Restore the result of :func:`generator_states`, as far as this process sees as many devices.

    Returns:
        A sentence if this process sees no accelerator of the type; else None.
    """
    here, then = kind() if count() else None, saved["kind"]
    if here != then:
        found = "no GPU" if here is None else f"{here.upper()} devices"
        return f"the {then.upper()} generator's state was not restored, because this machine has {found}"
    for device, state in zip(_from_current(then), saved["states"], strict=False):
        _module(then).set_rng_state(state, device)
    return None


def _from_current(kind: str) -> list[torch.device]:
    """Return the visible devices, the current device first."""
    current, visible = int(_module(kind).current_device()), count()
    return [torch.device(kind, (current + step) % visible) for step in range(visible)]


def _module(device: torch.device | str) -> Any:
    return torch.get_device_module(device)
