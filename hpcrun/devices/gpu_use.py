"""Utilization and memory of one GPU, sampled in the background: NVIDIA's by NVML, AMD's from its driver."""

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from hpcrun.devices import amd

Sample = Callable[[], tuple[float, float] | None]
"""Returns utilization in percent and used bytes; None ends the sampling."""

SAMPLE_S = 2.0
"""Seconds between two samples. NVML itself averages utilization over at most one second."""


class GpuUse:
    """Samples one GPU in a thread until :meth:`close`."""

    def __init__(self, sample: Sample, every: float = SAMPLE_S) -> None:
        """Start the thread; ``every``: seconds between two samples."""
        self._sample, self._every = sample, every
        self._lock = threading.Lock()
        self._busy: list[float] = []
        self._used = math.nan
        self._over = threading.Event()
        threading.Thread(target=self._run, name="hpcrun-gpu-use", daemon=True).start()

    def read(self) -> tuple[float, float]:
        """Return the mean utilization (percent) and the most memory (bytes) since the last call.

        The memory is that of all processes on the GPU, with torch's cache. NaN without a sample.
        """
        with self._lock:
            busy, used = self._busy, self._used
            self._busy, self._used = [], math.nan
        return (sum(busy) / len(busy) if busy else math.nan), used

    def close(self) -> None:
        """End the thread."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._every):
            found = self._sample()
            if found is None:
                return
            busy, used = found
            with self._lock:
                self._busy.append(busy)
                self._used = used if math.isnan(self._used) else max(self._used, used)


def gpu_use(uuid: str, every: float = SAMPLE_S) -> GpuUse | None:
    """Start to sample the GPU with this UUID; None without NVML, its driver, or this GPU.

    Args:
        uuid: as CUDA has it, without the prefix ``GPU-``.
        every: seconds between two samples.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # As bytes, since older versions of the module accept no text here; newer versions accept both.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except pynvml.NVMLError:
        return None
    return GpuUse(partial(ask_nvml, pynvml, handle), every)


def amd_gpu_use(address: str, every: float = SAMPLE_S) -> GpuUse | None:
    """Start to sample AMD's GPU with this PCI address; None if its driver has no answer."""
    return None if amd.use(address) is None else GpuUse(partial(amd.use, address), every)


def ask_nvml(nvml: Any, handle: Any) -> tuple[float, float] | None:
    """Return the percent of time that the GPU was busy, and its used bytes; None without an answer."""
    try:
        busy = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        used = float(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    except nvml.NVMLError:
        # A slice of a GPU (MIG) has no utilization, and a lost GPU has no answer.
        return None
    return busy, used
