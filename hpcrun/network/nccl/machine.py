"""Read the facts about this node from /sys, /proc, NVML and ``nvidia-smi``, without root."""

import contextlib
import os
import re
import resource
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.network.nccl.rules import installed_nccl
from hpcrun.ranks.addresses import is_only_loopback, outward_address
from hpcrun.slurm import run


@dataclass(frozen=True)
class Interface:
    """A network interface. ``speed`` in Mbit/s, None if the driver does not report it."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    speed: int | None = None


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device. ``layer``: InfiniBand or Ethernet. ``rate`` in Gbit/s."""

    device: str
    port: int
    layer: str
    active: bool
    rate: int | None = None
    driver: str = ""


@dataclass(frozen=True)
class NodeFacts:
    """The facts about a node; an unknown value is empty or None.

    Attributes:
        host: the host's name.
        interfaces: in the kernel's order, in which NCCL looks through them.
        route: the interface to the other nodes, or of the default route.
        loopback_name: there are other nodes, and the host's own name resolves only to loopback addresses.
        rdma: the ports under /sys/class/infiniband, EFA's too.
        verbs: a device under /dev/infiniband can be opened.
        cxi: the number of Slingshot devices under /sys/class/cxi.
        plugins: paths of NCCL network plugins on the library path.
        gpus: name of each GPU.
        peermem: the module for GPUDirect RDMA is loaded.
        memlock: bytes that may be locked, -1 for no limit.
        shm: size of /dev/shm in bytes.
        numa_balancing: the kernel moves pages between NUMA nodes by itself.
        nccl: the version of its wheel.
    """

    host: str
    interfaces: tuple[Interface, ...] = ()
    route: str | None = None
    loopback_name: bool = False
    rdma: tuple[RdmaPort, ...] = ()
    verbs: bool | None = None
    cxi: int = 0
    plugins: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    peermem: bool | None = None
    memlock: int | None = None
    shm: int | None = None
    numa_balancing: bool | None = None
    nccl: str | None = None

    @property
    def amd(self) -> bool:
        """True if the GPUs are AMD's, so that the library is RCCL."""
        return any(name.startswith(("AMD", "MI")) for name in self.gpus)


_PLUGIN = re.compile(r"libnccl-net[^/]*\.so.*|librccl-net[^/]*\.so.*")


def inspect_node(
    environ: Mapping[str, str], peers: Sequence[str] = (), root: Path = Path("/")
) -> NodeFacts:
    """Return the facts about this node; what cannot be read is left empty.

    Args:
        environ: for the library path.
        peers: names of the other nodes, to find the interface to them.
        root: folder with /sys, /proc and /dev; tests use another folder.
    """
    interfaces = read_interfaces(root)
    return NodeFacts(
        host=socket.gethostname(),
        interfaces=interfaces,
        route=_route(interfaces, peers, root),
        loopback_name=bool(peers) and is_only_loopback(socket.gethostname()),
        rdma=read_rdma(root),
        verbs=_can_open_verbs(root),
        cxi=len(_children(root / "sys/class/cxi")),
        plugins=_plugins(environ, root),
        gpus=_gpus(root),
        peermem=(root / "sys/module/nvidia_peermem").is_dir(),
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        shm=_size(root / "dev/shm"),
        numa_balancing=_numa_balancing(root),
        nccl=installed_nccl(),
    )


def read_interfaces(root: Path) -> tuple[Interface, ...]:
    """Return the network interfaces of this node in the kernel's order (ip(8) prints the same)."""
    import psutil

    addresses = psutil.net_if_addrs()
    folders = _children(root / "sys/class/net")
    ordered = sorted(folders, key=lambda folder: int(_text(folder / "ifindex") or 0))
    return tuple(
        Interface(
            name=folder.name,
            addresses=tuple(
                entry.address.partition("%")[0]
                for entry in addresses.get(folder.name, [])
                if entry.family in (socket.AF_INET, socket.AF_INET6)
            ),
            up=_text(folder / "operstate") in ("up", "unknown"),
            speed=_positive(_text(folder / "speed")),
        )
        for folder in ordered
        if (folder / "ifindex").exists()
    )


def read_rdma(root: Path) -> tuple[RdmaPort, ...]:
    """Return every port under /sys/class/infiniband, devices in the order of their numbers."""
    ports = []
    for device in sorted(_children(root / "sys/class/infiniband"), key=_natural):
        driver = device / "device" / "driver"
        for port in sorted(_children(device / "ports"), key=_natural):
            rate = re.match(r"\d+", _text(port / "rate"))
            ports.append(
                RdmaPort(
                    device=device.name,
                    port=int(port.name),
                    layer=_text(port / "link_layer") or "InfiniBand",
                    active=_text(port / "state").endswith("ACTIVE"),
                    rate=int(rate[0]) if rate else None,
                    driver=driver.resolve().name if driver.exists() else "",
                )
            )
    return tuple(ports)


def _route(interfaces: Sequence[Interface], peers: Sequence[str], root: Path) -> str | None:
    """Return the interface of the kernel's route to ``peers``, else of the default route."""
    own = outward_address(peers)
    for interface in interfaces:
        if own is not None and own in interface.addresses:
            return interface.name
    for line in _text(root / "proc/net/route").splitlines()[1:]:
        words = line.split()
        if len(words) > 1 and words[1] == "00000000":
            return words[0]
    return None


def _can_open_verbs(root: Path) -> bool:
    return any(
        os.access(path, os.R_OK | os.W_OK)
        for path in _children(root / "dev/infiniband")
        if path.name.startswith("uverbs")
    )


def _plugins(environ: Mapping[str, str], root: Path) -> tuple[str, ...]:
    folders = [Path(name) for name in environ.get("LD_LIBRARY_PATH", "").split(":") if name]
    folders += [root / name for name in ("opt/amazon/ofi-nccl/lib", "opt/aws-ofi-nccl/lib")]
    folders += list((root / "opt/amazon/ofi-nccl/lib").glob("*-linux-gnu"))
    names = [
        path for folder in folders for path in _children(folder) if _PLUGIN.fullmatch(path.name)
    ]
    return tuple(dict.fromkeys(map(str, names)))


def _gpus(root: Path) -> tuple[str, ...]:
    """Return the names of NVIDIA's GPUs, or one name for each of AMD's."""
    listed = run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], timeout=20)
    if listed.returncode == 0:
        return tuple(listed.stdout.split("\n")[:-1])
    cards = [
        path for path in _children(root / "sys/class/drm") if re.fullmatch(r"card\d+", path.name)
    ]
    vendors = [_text(card / "device/vendor") for card in cards]
    return ("AMD GPU",) * vendors.count("0x1002")


def _numa_balancing(root: Path) -> bool | None:
    text = _text(root / "proc/sys/kernel/numa_balancing")
    return text != "0" if text else None


def _size(folder: Path) -> int | None:
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        return found.f_blocks * found.f_frsize
    return None


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        # The speed of a link that is down cannot be read.
        return ""


def _positive(text: str) -> int | None:
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _natural(path: Path) -> list[int | str]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path.name)]
