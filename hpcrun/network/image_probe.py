"""The probe of ``job.image``: what the image holds, and whether the runtime passes the node's driver into it.

It runs inside the image, as the ranks do.
"""

import contextlib
import platform
from importlib import metadata

from hpcrun.devices.driver import TorchBuild, newest_of_driver, torch_build
from hpcrun.network.probes import Answer, Needs, Records, Same, probe


@probe("image")
def image(needs: Needs) -> Records:
    """Check torch, hpcrun and the driver as a rank sees them."""
    if needs.image is None:
        return
    built = torch_build()
    if built is None:
        remedy = "install torch in the image, or name its Python with job.python"
        yield Answer("fail", f"{needs.image} has no torch for {platform.python_version()}", remedy)
        return
    inside = own_version()
    if needs.version is not None and inside != needs.version:
        words = f"hpcrun is {inside} in {needs.image}, and {needs.version} outside"
        yield Answer("warn", words, "install the same version in the image")
    yield Same("contents", f"{_system()}, torch {built.version}", "use one image on all nodes")
    if needs.gpus != 0:
        yield driver(built, newest_of_driver())


def own_version() -> str | None:
    """Return the version of hpcrun; None if it is not installed but on the path."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("hpcrun")
    return None


def _system() -> str:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    return "Linux"


def driver(built: TorchBuild, newest: int | None) -> Answer:
    """Judge the driver that is visible in the image.

    Args:
        newest: the newest CUDA of the driver (12040 is 12.4); None without a driver.
    """
    if built.platform == "ROCm":
        return Answer("pass", f"torch for ROCm {built.number}")
    if built.platform is None:
        remedy = "use an image with a torch for GPUs, or train with job.cpu=true"
        return Answer("fail", f"torch {built.version} of the image is built for CPUs only", remedy)
    if newest is None:
        remedy = (
            "see whether nvidia-smi works on the node; the runtime passes the driver on (--nv of "
            "apptainer, --gpu of podman-hpc, the hook of enroot)"
        )
        return Answer("fail", "NVIDIA's driver is not visible in the image", remedy)
    known = f"the driver supports CUDA {newest // 1000}.{newest % 1000 // 10}"
    # CUDA's minor versions are compatible with each driver of the same major version.
    if newest // 1000 < int(built.number.split(".")[0]):
        remedy = f"use an image for CUDA {newest // 1000}, or nodes with a newer driver"
        return Answer("fail", f"{known}, and torch is built for CUDA {built.number}", remedy)
    return Answer("pass", f"{known}, torch is built for {built.number}")
