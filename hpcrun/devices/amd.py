"""AMD's GPUs, from files of the kernel's driver: those that a process sees, CPUs near them, and their use.

``rocm-smi`` shows the same values. The files need no library and no permission.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

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
