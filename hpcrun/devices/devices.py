"""Count the GPUs that this process may use, without importing torch.

The submitter must know in milliseconds whether a local run has GPUs, and CUDA must not be
initialized before the worker has chosen its device.
"""

import socket
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from hpcrun.errors import NodeUnfit

NVIDIA = Path("/proc/driver/nvidia/gpus")
NODES = Path("/sys/class/kfd/kfd/topology/nodes")
"""The devices of the compute part of AMD's driver: CPUs and GPUs."""

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
    return nvidia or (_amd_count(kfd) if driver.exists() else 0)


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


def missing_driver(environ: Mapping[str, str]) -> str | None:
    """Return a warning if Slurm lists GPUs for a script, but this node has no driver for them; else None.

    hpcrun cannot import the libraries of a script, so it cannot see that the script trains on the CPU.
    """
    listed = given_gpus(environ) and "CUDA_VISIBLE_DEVICES" in environ
    if listed and not _driver_count(NVIDIA) and not AMD_DRIVER.exists() and not _nvml_count():
        return (
            f"WARNING: {socket.gethostname()}: Slurm gave this job GPUs here, and the node shows no GPU "
            f"driver ({NVIDIA}): the script may train on the CPU; run nvidia-smi on this node"
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
    devices = list(
        takewhile(
            lambda entry: entry.isdecimal() or entry.startswith(("GPU-", "MIG-")),
            (entry.strip() for entry in listed.split(",")),
        )
    )
    if devices and devices[0].startswith("MIG-"):
        # NVIDIA's MIG user guide, "CUDA Device Enumeration": only the first slice counts.
        return 1
    return len(devices) if len(set(devices)) == len(devices) else 0


def _nvml_count() -> int | None:
    """Ask NVML; None if it is not installed or its driver does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # without the package, pynvml's own error has no name
        return None


def _driver_count(proc: Path) -> int:
    try:
        return sum(1 for _ in proc.iterdir())
    except OSError:
        return 0


def _amd_count(nodes: Path) -> int:
    """Count the GPUs of AMD's driver: its devices with compute units (the other ones are CPUs)."""
    found = 0
    for path in nodes.glob("*/properties"):
        try:
            words = path.read_text().split()
        except OSError:
            # The kernel refuses GPUs that the job's control group hides.
            continue
        found += "simd_count" in words and words[words.index("simd_count") + 1] != "0"
    return found
