"""Utilization and memory of one NVIDIA GPU, sampled by NVML in the background."""

import math
import threading
from typing import Any

SAMPLE_S = 2.0
"""Seconds between two samples. NVML itself averages utilization over at most one second."""


class GpuUse:
    """Samples one GPU in a thread until :meth:`close`; two calls of NVML for a sample."""

    def __init__(self, nvml: Any, handle: Any, every: float = SAMPLE_S) -> None:
        """Start the thread.

        Args:
            nvml: the module pynvml, initialized.
            handle: NVML's handle of the GPU.
            every: seconds between two samples.
        """
        self._nvml, self._handle, self._every = nvml, handle, every
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
            try:
                busy = float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
                used = float(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
            except self._nvml.NVMLError:
                # A slice of a GPU (MIG) has no utilization, and a lost GPU has no answer.
                return
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
    return GpuUse(pynvml, handle, every)
