"""Features of NVIDIA's CUDA and AMD's HIP only. In torch both have the device type ``cuda``.

The switches do nothing on other devices, so that callers need no case for them.
"""

import contextlib
import ctypes
import math
import os
import threading
from collections.abc import Callable
from typing import Any, Literal

import torch

KIND = "cuda"
"""The device type of NVIDIA's and AMD's GPUs."""

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
"""Modes of torch.compile."""

WITHOUT_GRAPHS: dict[str, CompileMode] = {
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}
"""The modes of torch.compile that capture CUDA graphs, each with a similar mode that captures none."""

_AMPERE = (8, 0)
"""The first compute capability with bfloat16."""

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices


def build() -> tuple[str, str] | None:
    """Return the platform that torch is built for and its version; None for a build without either."""
    if torch.version.cuda:
        return "CUDA", torch.version.cuda
    return ("ROCm", torch.version.hip) if torch.version.hip else None


def versions() -> dict[str, str | None]:
    """Return the versions of torch, CUDA and NCCL by name; None for what torch is built without."""
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl_version()}


def nccl_version() -> str | None:
    """Return NCCL's version, or None if torch was built without NCCL."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    return ".".join(map(str, version()))


def libraries() -> dict[str, str]:
    """Return the versions of the libraries that compute and communicate on GPUs, by name."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None  # type: ignore[no-untyped-call]
    found = {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": cudnn,
        "nccl": nccl_version(),
    }
    return {name: str(version) for name, version in found.items() if version is not None}


def capability(device: torch.device) -> dict[str, str]:
    """Return the compute capability of a GPU, for example ``{"capability": "9.0"}``; nothing for others."""
    if device.type != KIND:
        return {}
    major, minor = torch.cuda.get_device_capability(device)
    return {"capability": f"{major}.{minor}"}


def fix_workspace() -> None:
    """Let cuBLAS use a workspace with which it is deterministic, unless the user has chosen another."""
    # cuBLAS reads the variable at its first use; older torch refuses cuBLAS without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def allow_tf32(device: torch.device) -> None:
    """Allow TensorFloat-32 for the fp32 matrix products of the whole process.

    Uses the one switch that torch 2.6 and 2.13 both have and torch.compile reads. Torch refuses to mix it
    with the newer ``torch.backends.cuda.matmul.fp32_precision``. On AMD some versions of torch also want a
    variable, which they read at the first matrix product.
    """
    if device.type == KIND:
        torch.set_float32_matmul_precision("high")
        if torch.version.hip:
            os.environ.setdefault("HIPBLASLT_ALLOW_TF32", "1")


def forbid_tf32(device: torch.device) -> None:
    """Compute fp32 convolutions and recurrent layers of the whole process in fp32.

    torch allows TensorFloat-32 there by default, unlike in matrix products.
    """
    if device.type == KIND:
        torch.backends.cudnn.allow_tf32 = False


def has_bf16(device: torch.device) -> bool:
    """Return True if ``device`` is a GPU with matrix products in bfloat16 that are faster than in fp32."""
    if device.type != KIND:
        return False
    # AMD's CDNA GPUs have it since MI100.
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= _AMPERE


def lock_pages(address: int, size: int) -> tuple[Callable[[], object] | None, str]:
    """Lock pages of host memory, to which all GPUs then copy at full speed and asynchronously.

    torch's allocator of page-locked memory rounds up to a power of two and keeps every block.

    Returns:
        The function that unlocks the pages, or None if there is no GPU or the pages cannot be locked; and
        the reason why they cannot be locked, or an empty text.
    """
    if not torch.cuda.is_available():
        return None, ""
    last_error = _last_error()
    if last_error is None:
        return None, "torch is linked to no shared runtime library"
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(address, size, _PORTABLE))
    if code:
        # The runtime keeps the error of the thread, and torch would raise it at the thread's next kernel.
        last_error()
        return None, f"CUDA error {code}"
    return lambda: cudart.cudaHostUnregister(address), ""


def _last_error() -> Callable[[], int] | None:
    """Return the runtime's function that reads and clears the error of the thread; torch has no name for it.

    None: torch's libraries contain the runtime without its names.
    """
    # A handle of torch's library also finds the names in the libraries to which it is linked, so this is the
    # runtime that torch uses.
    library = ctypes.CDLL(torch._C.__file__)
    return getattr(library, "hipGetLastError" if torch.version.hip else "cudaGetLastError", None)


class GpuUtilization:
    """The utilization of a GPU in percent, sampled in a thread until :meth:`close`.

    Args:
        sample: returns the percent of the time with a kernel; any error ends the samples.
        every: seconds between two samples; the driver's own period is at most one second.
    """

    def __init__(self, sample: Callable[[], float], every: float) -> None:
        """Start the thread."""
        self._sample, self._every = sample, every
        self._samples: list[float] = []
        self._last = math.nan
        self._over = threading.Event()
        threading.Thread(target=self._run, name="hpcrun-gpu-utilization", daemon=True).start()

    def read(self) -> float:
        """Return the mean percent of the samples since the last call, or the newest; NaN without a sample."""
        found, self._samples = self._samples, []
        if found:
            self._last = found[-1]
        return sum(found) / len(found) if found else self._last

    def close(self) -> None:
        """End the thread."""
        self._over.set()

    def _run(self) -> None:
        # A GPU without NVML, and a slice of a GPU (MIG), have no utilization.
        with contextlib.suppress(Exception):
            while not self._over.wait(self._every):
                self._samples.append(float(self._sample()))


def gpu_utilization(device: torch.device, every: float = 2.0) -> GpuUtilization | None:
    """Begin to sample a GPU's utilization, which needs nvidia-ml-py; None for other devices.

    Args:
        every: seconds between two samples.
    """
    if device.type != KIND:
        return None
    return GpuUtilization(lambda: torch.cuda.utilization(device), every)
