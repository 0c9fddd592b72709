"""Count the GPUs that this process may use, without importing torch.

The submitter must know in milliseconds whether a local run has GPUs, and CUDA must not be
initialised before the worker has chosen its device.
"""

from collections.abc import Mapping
from pathlib import Path


def visible_gpus(environ: Mapping[str, str], proc: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Return how many GPUs CUDA would show to a process with this environment.

    CUDA_VISIBLE_DEVICES decides where it is set, otherwise NVML (when pynvml is installed),
    otherwise the driver's list in ``proc``; 0 where there is none of them.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return _listed_devices(listed)
    counted = _nvml_count()
    return _driver_count(proc) if counted is None else counted


def _listed_devices(listed: str) -> int:
    """Count the entries as CUDA does (CUDA C++ Programming Guide, "CUDA Environment Variables").

    The first invalid entry ends the list (``0,1,-1,2`` is two devices), and a device named twice
    empties it. Slurm writes ``NoDevFiles`` for a task without GPUs.
    """
    devices: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        if not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
            break
        devices.append(entry)
    return len(devices) if len(set(devices)) == len(devices) else 0


def _nvml_count() -> int | None:
    """Ask NVML; None where it is not installed or its driver does not answer."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _driver_count(proc: Path) -> int:
    try:
        return sum(1 for _ in proc.iterdir())
    except OSError:
        return 0
