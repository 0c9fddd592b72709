"""The probes of a node's GPUs (numbers from NVML, a matrix product) and of ``job.image``.

That of the image runs inside it, as the ranks do: it sees the torch of the image, and the driver of the node
if the runtime passes it into the image.
"""

import contextlib
import functools
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

from hpcrun.devices.devices import visible_gpus
from hpcrun.devices.driver import TorchBuild, newest_of_driver, torch_build
from hpcrun.network.probes import library_versions, probe
from hpcrun.network.torch_child import TorchChild
from hpcrun.ports.node_checks import Answer, Needs, Records, Same, Status, Timed

# Seconds: all nodes may import torch at the same time from one slow file system; then come the products.
_IMPORT, _PRODUCTS = 300.0, 120.0
_REPORT = "report the node; its administrator resets or replaces the GPU"
# NVML's clocks-event reasons (nvml.h, nvmlClocksEventReason*).
_HARDWARE_SLOWDOWN, _SOFTWARE_THERMAL, _HARDWARE_THERMAL, _POWER_BRAKE = 0x08, 0x20, 0x40, 0x80


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


@functools.cache
def read_gpus() -> dict[str, Any]:
    """Return the ``driver`` and ``devices``, a record for each GPU of this process, or the ``problem``.

    CUDA_VISIBLE_DEVICES limits the GPUs. A number that the driver does not report is None. Temperatures and
    clocks are not read: limits for them differ by model.
    """
    try:
        import pynvml
    except ImportError:
        return {"problem": "nvidia-ml-py is not installed"}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"problem": f"NVML does not start: {error}"}
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        devices = [_device(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        return {"problem": f"NVML: {error}"}
    finally:
        pynvml.nvmlShutdown()
    return {"driver": driver, "devices": _visible(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))}


def _device(nvml: Any, index: int) -> dict[str, Any]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        # "GPU is lost": the driver still counts the device.
        return {"index": index, "problem": str(error)}

    def value(function: str, *arguments: Any) -> Any:
        """Return a number; None if this model or version of the driver does not have it."""
        try:
            return getattr(nvml, function)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    remapped = value("nvmlDeviceGetRemappedRows")
    uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return {
        "index": index,
        "uuid": value("nvmlDeviceGetUUID") or "",
        "uncorrected": value("nvmlDeviceGetTotalEccErrors", *uncorrected),
        "remap_pending": bool(remapped and remapped[2]),
        "remap_failed": bool(remapped and remapped[3]),
        "throttling": value("nvmlDeviceGetCurrentClocksThrottleReasons"),
        "width": value("nvmlDeviceGetCurrPcieLinkWidth"),
        "full_width": value("nvmlDeviceGetMaxPcieLinkWidth"),
    }


def _visible(devices: list[dict[str, Any]], listed: str | None) -> list[dict[str, Any]]:
    """Return the devices that CUDA_VISIBLE_DEVICES lists; all if it is not set or lists slices (MIG)."""
    if listed is None or "MIG-" in listed:
        return devices
    chosen = []
    for word in (part.strip() for part in listed.split(",")):
        found = [
            device
            for device in devices
            if str(device["index"]) == word
            or (word.startswith("GPU-") and device.get("uuid", "").startswith(word))
        ]
        if not found:
            # CUDA ignores what follows an invalid entry.
            break
        chosen += found[:1]
    return chosen


@probe("gpus", hardware=True)
def gpus(needs: Needs) -> Records:
    """Check the number of GPUs, and that the driver has lost none."""
    if needs.gpus == 0:
        yield Answer("pass", "none requested")
        return
    visible, reported = visible_gpus(os.environ), read_gpus()
    lost = [device for device in reported.get("devices", ()) if "problem" in device]
    for device in lost:
        yield Answer("fail", f"GPU {device['index']}: {device['problem']}", _REPORT)
    if needs.gpus is not None and visible < needs.gpus:
        remedy = (
            "see nvidia-smi on the node, and the job's request for GPUs (job.gpus, job.gpu_request)"
        )
        yield Answer("fail", f"{visible} of {needs.gpus} GPUs are visible", remedy)
    elif not lost:
        yield Answer("pass", f"{visible} visible")
    if "driver" in reported:
        remedy = "the administrator installs one driver on all nodes"
        yield Same("driver", reported["driver"], remedy, "warn", check="versions")


def _each_device(judge: Callable[[Mapping[str, Any]], tuple[Status, str, str]]) -> Any:
    """Return a probe that makes a statement about each GPU, or explains once that NVML is missing."""

    @functools.wraps(judge)
    def function(needs: Needs) -> Records:
        for device in _devices(needs):
            status, words, remedy = judge(device)
            of = "" if status == "pass" else f"GPU {device['index']}: "
            yield Answer(status, of + words, remedy)
        yield from _without_nvml(needs)

    return function


def _devices(needs: Needs) -> list[dict[str, Any]]:
    reported = {} if needs.gpus == 0 else read_gpus()
    return [device for device in reported.get("devices", ()) if "problem" not in device]


def _without_nvml(needs: Needs) -> Iterator[Answer]:
    """Explain the missing numbers, if GPUs are expected or visible."""
    wanted = needs.gpus or (needs.gpus is None and visible_gpus(os.environ))
    if wanted and "problem" in read_gpus():
        yield Answer("unknown", read_gpus()["problem"], "pip install 'hpcrun[gpu]'")


@probe("ecc", hardware=True)
@_each_device
def ecc(device: Mapping[str, Any]) -> tuple[Status, str, str]:
    """Check the errors of the GPU's memory."""
    count = device["uncorrected"]
    if device["remap_failed"]:
        return "fail", "a damaged row of memory could not be replaced", _REPORT
    if count:
        return "fail", f"{count} uncorrected ECC errors since the last reset", _REPORT
    if device["remap_pending"]:
        remedy = "an administrator resets the GPU, which replaces the row"
        return "warn", "a damaged row of memory is not yet replaced", remedy
    if count is None:
        return "unknown", "the driver reports no ECC errors (ECC is off or missing)", ""
    return "pass", "no uncorrected error", ""


@probe("throttling", hardware=True)
@_each_device
def throttling(device: Mapping[str, Any]) -> tuple[Status, str, str]:
    """Check that nothing slows the GPU down."""
    reasons = device["throttling"]
    if reasons is None:
        return "unknown", "the driver reports no reasons for its clocks", ""
    if reasons & (_HARDWARE_THERMAL | _POWER_BRAKE):
        what = "heat" if reasons & _HARDWARE_THERMAL else "its power supply"
        remedy = "report the node; its cooling or power supply has failed"
        return "fail", f"slowed down by the hardware because of {what}", remedy
    if reasons & (_HARDWARE_SLOWDOWN | _SOFTWARE_THERMAL):
        return "warn", f"slowed down (reasons {reasons:#x})", "see nvidia-smi -q -d PERFORMANCE"
    return "pass", "not slowed down", ""


@probe("pcie", hardware=True)
@_each_device
def pcie(device: Mapping[str, Any]) -> tuple[Status, str, str]:
    """Check the lanes of the GPU's link."""
    width, full = device["width"], device["full_width"]
    if not width or not full:
        return "unknown", "the driver reports no PCIe width", ""
    if width < full:
        # An x16 link with 4 lanes makes every copy four times slower, for all ranks.
        status: Status = "fail" if width * 4 <= full else "warn"
        remedy = "report the node; the GPU or its riser has a bad contact"
        return status, f"{width} of {full} PCIe lanes", remedy
    return "pass", f"x{width}", ""


@probe("gemm", seconds=_IMPORT + _PRODUCTS + 5, hardware=True)
def gemm(needs: Needs) -> Records:
    """Multiply matrices of small integers on each GPU, or on the CPU: every good device has the same bits."""
    child, end = TorchChild(), {"stage": "hangs"}
    try:
        here = child.wait(("here",), _IMPORT)
        if here["stage"] == "here":
            yield from library_versions(here["versions"])
            child.tell({"do": "multiply", "cpu": needs.gpus == 0})
            end = child.wait(("done", "failed"), _PRODUCTS)
            for one in child.answers:
                if one["stage"] == "product":
                    yield from product(one, needs)
    finally:
        child.kill()
    if here["stage"] == "hangs":
        yield Answer(
            "unknown", f"torch is not imported in {_IMPORT:g} s", "look at the file system"
        )
    elif here["stage"] != "here":
        remedy = (
            "try `python -c 'import torch'` on the node, with the Python of the job (job.python)"
        )
        yield Answer("fail", f"torch cannot be imported: {here['problem']}", remedy, "warn")
    elif end["stage"] != "done":
        words = end.get("problem", f"no result within {_PRODUCTS:g} s")
        remedy = "try `python -m hpcrun.network.torch_rank` on the node"
        yield Answer("unknown" if needs.gpus == 0 else "fail", words, remedy)


def product(found: Mapping[str, Any], needs: Needs) -> Records:
    """Judge the product of one device."""
    device = found["device"]
    if "problem" in found:
        remedy = "see nvidia-smi on the node, and report it"
        yield Answer("fail", f"{device}: {found['problem']}", remedy)
        return
    bad = "report the node; its results cannot be trusted"
    yield Same("product", found["digest"], bad, of=device)
    if found["wrong"]:
        words = f"{device}: {found['wrong']} entries of a matrix product are wrong"
        yield Answer("fail", words, bad)
    elif device == "cpu" and needs.gpus:
        yield Answer("unknown", "torch sees no GPU; exact on the CPU")
    else:
        yield Answer("pass", f"exact on {device}")
    if "seconds" in found:
        remedy = "check its clocks: nvidia-smi -q -d CLOCK"
        yield Timed(found["name"], found["seconds"], remedy, device)
