"""The state of a node's GPUs: numbers from NVML, and error lines (Xid) from the kernel's log.

The functions return raw numbers. The checks are in checks.py, so that they also work with recorded numbers.
"""

import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

_XID = re.compile(
    r"^(?:<\d+>)?\[\s*(?P<time>\d+\.\d+)\].*NVRM: Xid \(PCI:(?P<bus>[\w:.]+)\): (?P<number>\d+)"
)
_MOST_XIDS = 8


def read_gpus(environ: Mapping[str, str], nvml: ModuleType | None = None) -> dict[str, Any]:
    """Return ``devices``, a record for each GPU of this process, or ``problem``, the reason for none.

    A number that the driver does not report is None. Temperatures and clocks are not read: limits for them
    differ by model.

    Args:
        environ: CUDA_VISIBLE_DEVICES limits the GPUs.
        nvml: the module pynvml, imported when None.
    """
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return {"problem": "nvidia-ml-py is not installed"}
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"problem": f"NVML does not start: {error}"}
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        count = int(nvml.nvmlDeviceGetCount())
        devices = [_device(nvml, index) for index in range(count)]
    except nvml.NVMLError as error:
        return {"problem": f"NVML: {error}"}
    finally:
        nvml.nvmlShutdown()
    return {"driver": driver, "devices": _visible(devices, environ.get("CUDA_VISIBLE_DEVICES"))}


def _device(nvml: ModuleType, index: int) -> dict[str, Any]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        # "GPU is lost": the driver still counts the device.
        return {"index": index, "problem": str(error)}

    def told(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (nvml.NVMLError, AttributeError):
            # This model or driver version does not have the value.
            return None

    remapped = told(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    return {
        "index": index,
        "name": told(lambda: _text(nvml.nvmlDeviceGetName(handle))),
        "uuid": told(lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
        "bus": told(lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        "ecc": told(lambda: nvml.nvmlDeviceGetEccMode(handle)[0]),
        "uncorrected": told(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        ),
        "remap_pending": None if remapped is None else bool(remapped[2]),
        "remap_failed": None if remapped is None else bool(remapped[3]),
        "throttling": told(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        "width": told(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "full_width": told(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    }


def _text(value: "str | bytes") -> str:
    """Return NVML's text, which older versions of nvidia-ml-py return as bytes."""
    return value.decode() if isinstance(value, bytes) else value


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
            or (word.startswith("GPU-") and (device.get("uuid") or "").startswith(word))
        ]
        if not found:
            # CUDA ignores what follows an invalid entry.
            break
        chosen += found[:1]
    return chosen


def read_xids(uptime: Path = Path("/proc/uptime")) -> dict[str, Any]:
    """Return ``xids``, the newest errors of GPUs in the kernel's log, or ``problem``.

    Each has ``bus``, ``number`` and ``age`` in seconds. At many sites, users may not read this log.
    """
    try:
        done = subprocess.run(
            ["dmesg", "--raw"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5,
            check=False,
        )
        now = float(uptime.read_text().split()[0])
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {"problem": f"the kernel's log cannot be read: {error}"}
    if done.returncode != 0:
        words = " ".join(done.stderr.split())[:120] or f"dmesg: exit code {done.returncode}"
        return {"problem": f"the kernel's log cannot be read: {words}"}
    return {"xids": parse_xids(done.stdout, now)}


def parse_xids(log: str, now: float) -> list[dict[str, Any]]:
    """Return the Xid errors of a kernel log.

    Args:
        log: the output of ``dmesg --raw``, with times in seconds since the start of the machine.
        now: seconds since that start.
    """
    found = [match for line in log.splitlines() if (match := _XID.match(line))]
    return [
        {
            "bus": match["bus"],
            "number": int(match["number"]),
            "age": round(now - float(match["time"])),
        }
        for match in found[-_MOST_XIDS:]
    ]
