"""The driver of NVIDIA's GPUs and the build of torch, read without importing torch."""

import ctypes
import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TorchBuild:
    """The version of torch, and the platform that it is built for: CUDA, ROCm or none, with its version."""

    version: str
    platform: str | None = None
    number: str = ""


def torch_build() -> TorchBuild | None:
    """Return the build of the installed torch; None if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    source = importlib.util.spec_from_file_location(
        "torch_version", Path(spec.origin).with_name("version.py")
    )
    assert source is not None
    assert source.loader is not None
    module = importlib.util.module_from_spec(source)
    try:
        source.loader.exec_module(module)
    except OSError:
        return None
    for platform, number in (("CUDA", module.cuda), ("ROCm", getattr(module, "hip", None))):
        if number:
            return TorchBuild(module.__version__, platform, number)
    return TorchBuild(module.__version__)


def newest_of_driver(library: str = "libcuda.so.1") -> int | None:
    """Return the newest CUDA that the driver's ``library`` supports (12040 is 12.4); None without it."""
    version = ctypes.c_int()
    try:
        # No other call: it would need a GPU and memory on it.
        failed = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value
