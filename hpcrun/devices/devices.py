"""Count the GPUs that this process may use, without importing torch.

The submitter must know in milliseconds whether a local run has GPUs, and CUDA must not be
initialized before the worker has chosen its device.

``rocm-smi`` shows the same values. The files need no library and no permission.
"""

import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpcrun.errors import NodeUnfit

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
    return None if use(address) is None else GpuUse(partial(use, address), every)


def ask_nvml(nvml: Any, handle: Any) -> tuple[float, float] | None:
    """Return the percent of time that the GPU was busy, and its used bytes; None without an answer."""
    try:
        busy = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        used = float(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    except nvml.NVMLError:
        # A slice of a GPU (MIG) has no utilization, and a lost GPU has no answer.
        return None
    return busy, used


NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""The devices of the driver's compute part: CPUs and GPUs."""

PCI = Path("/sys/bus/pci/devices")
"""The devices on the PCI bus."""


def gpu_addresses(environ: Mapping[str, str], nodes: Path = NODES) -> list[str]:
    """Return the PCI addresses of the GPUs that HIP shows to a process, in HIP's order: ``0000:c1:00.0``.

    ROCm's runtime lists the GPUs of ROCR_VISIBLE_DEVICES; of these, HIP shows those of HIP_VISIBLE_DEVICES,
    or of CUDA_VISIBLE_DEVICES, which it reads instead. Parts of one GPU (CPX mode) have one address.
    """
    shown = [(_address(gpu), f"{int(gpu.get('unique_id', 0)):016x}") for gpu in gpus(nodes)]
    for names in (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")):
        listed = next((environ[name] for name in names if name in environ), None)
        if listed is not None:
            shown = list(_chosen(shown, listed))
    return [address for address, _ in shown]


def gpus(nodes: Path = NODES) -> Iterator[dict[str, str]]:
    """Yield the driver's properties of each GPU that this process may use, in the driver's order."""
    numbered = [folder for folder in nodes.glob("*") if folder.name.isdecimal()]
    for folder in sorted(numbered, key=lambda folder: int(folder.name)):
        try:
            text = (folder / "properties").read_text()
            found = dict(line.split() for line in text.splitlines())
        except (OSError, ValueError):
            # The kernel refuses GPUs that the job's control group hides.
            continue
        if found.get("simd_count", "0") != "0":  # The other nodes are CPUs.
            yield found


def near_cpus(addresses: Sequence[str], pci: Path = PCI) -> list[frozenset[int]]:
    """Return the CPUs near each GPU; empty if the kernel does not know them for all."""
    try:
        return [_cpus((pci / address / "local_cpulist").read_text()) for address in addresses]
    except (OSError, ValueError):
        return []


def use(address: str, pci: Path = PCI) -> tuple[float, float] | None:
    """Return the utilization of a GPU in percent, and its used bytes; None if the driver has no answer."""
    try:
        busy, used = (
            float((pci / address / name).read_text())
            for name in ("gpu_busy_percent", "mem_info_vram_used")
        )
    except (OSError, ValueError):
        # A virtual function has no utilization.
        return None
    return busy, used


def _address(gpu: Mapping[str, str]) -> str:
    # The highest bits are the number of a part of the GPU.
    place = int(gpu.get("location_id", "0"))
    domain = int(gpu.get("domain", "0"))
    return f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"


def _chosen(shown: Sequence[tuple[str, str]], listed: str) -> Iterator[tuple[str, str]]:
    """Yield the GPUs that a variable lists; the first entry without a GPU ends the list."""
    for entry in (part.strip() for part in listed.split(",")):
        if entry.isdecimal():
            found = shown[int(entry) : int(entry) + 1]
        else:
            found = [gpu for gpu in shown if entry.lower() == f"gpu-{gpu[1]}"][:1]
        if not found:
            return
        yield from found


def _cpus(listed: str) -> frozenset[int]:
    """Return the CPUs of a list of the kernel, such as ``0-15,64-79``."""
    ends = [part.split("-") for part in listed.strip().split(",") if part]
    return frozenset(cpu for span in ends for cpu in range(int(span[0]), int(span[-1]) + 1))


NVIDIA = Path("/proc/driver/nvidia/gpus")
AMD_DRIVER = Path("/dev/kfd")

# ROCm's libraries read CUDA's variable like HIP's.
_AMD_LISTS = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_GIVEN_LISTS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")

GPU_JOB = "HPCRUN_GPU_JOB"
"""Variable with the id of a job with ranks that must train on GPUs, whether or not Slurm counts GPUs."""


def visible_gpus(
    environ: Mapping[str, str],
    proc: Path = NVIDIA,
    kfd: Path = NODES,
    driver: Path = AMD_DRIVER,
) -> int:
    """Return the number of GPUs that CUDA or ROCm would show to a process with this environment.

    CUDA_VISIBLE_DEVICES decides if it is set, and on AMD HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES
    as well; otherwise NVML (if pynvml is installed), otherwise the drivers' lists; 0 if there is none
    of them.

    Args:
        proc: the list of NVIDIA's driver.
        kfd: the list of AMD's driver.
        driver: the device that ROCm opens; ROCm shows no GPU without it.
    """
    names = ["CUDA_VISIBLE_DEVICES"] if "CUDA_VISIBLE_DEVICES" in environ else []
    if not names or driver.exists():
        names += [name for name in _AMD_LISTS if name in environ]
    if names:
        return min(_listed_devices(environ[name]) for name in names)
    counted = _nvml_count()
    # NVML's 0 counts: the driver lists also the GPUs that a job's control group hides.
    nvidia = _driver_count(proc) if counted is None else counted
    return nvidia or (len(list(gpus(kfd))) if driver.exists() else 0)


def given_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs of this node that Slurm gave to the job or step; 0 outside Slurm."""
    if "SLURM_JOB_ID" not in environ or environ.get("HPCRUN_LOCAL_CLUSTER") == "1":
        return 0
    counted = environ.get("SLURM_GPUS_ON_NODE", "")
    if counted.isdecimal():
        return int(counted)
    listed = next((environ[name] for name in _GIVEN_LISTS if environ.get(name)), "")
    return len([gpu for gpu in listed.split(",") if gpu])


def require_given_gpus(environ: Mapping[str, str]) -> None:
    """Check that a GPU job sees GPUs here: otherwise it would train on the CPU, unnoticed.

    Slurm gave the job GPUs, or the job was submitted for GPUs at a site that allocates whole nodes.

    Raises:
        NodeUnfit: the job sees no GPU; the text has the remedy.
    """
    given = given_gpus(environ)
    # Another job may have left its own variable in the environment.
    wanted = GPU_JOB in environ and environ[GPU_JOB] == environ.get("SLURM_JOB_ID")
    # Intel's GPUs are not counted here; a program that uses them checks them itself.
    if not (given or wanted) or visible_gpus(environ) or environ.get("ZE_AFFINITY_MASK"):
        return
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    why = "no driver shows one" if shown is None else f"CUDA_VISIBLE_DEVICES is {shown!r}"
    if not given:
        raise NodeUnfit(
            f"{socket.gethostname()}: the job is for GPUs, Slurm gave it none here, and none is visible "
            f"({why}); to train on CPUs submit with --cpu, otherwise choose nodes with GPUs "
            "(job.partition, job.constraint), or request GPUs from Slurm (job.gpu_request)"
        )
    raise NodeUnfit(
        f"{socket.gethostname()}: Slurm gave this job {given} GPU(s) here, and none is visible ({why}); in a "
        "container pass them on (apptainer: --nv, or --rocm), otherwise run nvidia-smi or rocm-smi on this "
        "node; to train on CPUs submit with --cpu"
    )


def missing_driver(environ: Mapping[str, str], proc: Path = NVIDIA) -> str | None:
    """Return a warning if Slurm lists GPUs for a script, but this node has no driver for them; else None.

    hpcrun cannot import the libraries of a script, so it cannot see that the script trains on the CPU.
    """
    listed = given_gpus(environ) and "CUDA_VISIBLE_DEVICES" in environ
    if listed and not _driver_count(proc) and not AMD_DRIVER.exists() and not _nvml_count():
        return (
            f"WARNING: {socket.gethostname()}: Slurm gave this job GPUs here, and the node shows no GPU "
            f"driver ({proc}): the script may train on the CPU; run nvidia-smi on this node"
        )
    return None


def lists_mig(environ: Mapping[str, str]) -> bool:
    """Return True if the visible devices are slices of a GPU (MIG). CUDA shows one slice to a process."""
    return environ.get("CUDA_VISIBLE_DEVICES", "").strip().startswith("MIG-")


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
    if devices and devices[0].startswith("MIG-"):
        # NVIDIA's MIG user guide, "CUDA Device Enumeration": only the first slice counts.
        return 1
    return len(devices) if len(set(devices)) == len(devices) else 0


def _nvml_count() -> int | None:
    """Ask NVML; None if it is not installed or its driver does not answer."""
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
