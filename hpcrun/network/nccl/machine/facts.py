"""The facts about one node for the advice, as plain data that can be recorded and read again."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hpcrun.errors import NetworkError


@dataclass(frozen=True)
class Interface:
    """A network interface. ``speed`` in Mbit/s, None if the driver does not report it."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    speed: int | None = None
    mtu: int | None = None


@dataclass(frozen=True)
class Gid:
    """An entry of a port's GID table. ``kind``: ``IB/RoCE v1`` or ``RoCE v2``, as the kernel reports it."""

    index: int
    address: str
    kind: str


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA device. ``layer``: InfiniBand or Ethernet. ``rate`` in Gbit/s."""

    device: str
    port: int
    layer: str
    active: bool
    rate: int | None = None
    driver: str = ""
    gids: tuple[Gid, ...] = ()


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
        links: the kinds of link between the GPUs, as ``nvidia-smi topo -m`` names them.
        peermem: the module for GPUDirect RDMA is loaded.
        memlock: bytes that may be locked, -1 for no limit.
        shm: size of /dev/shm in bytes.
        numa_balancing: the kernel moves pages between NUMA nodes by itself.
        nccl, torch: versions.
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
    links: tuple[str, ...] = ()
    peermem: bool | None = None
    memlock: int | None = None
    shm: int | None = None
    numa_balancing: bool | None = None
    nccl: str | None = None
    torch: str | None = None
    __pydantic_config__ = ConfigDict(extra="forbid")

    def as_record(self) -> dict[str, Any]:
        """Return the facts as plain JSON data."""
        return dataclasses.asdict(self)

    @property
    def amd(self) -> bool:
        """True if the GPUs are AMD's, so that the library is RCCL."""
        return any(name.startswith(("AMD", "MI")) for name in self.gpus)


def facts_from(record: Mapping[str, Any]) -> NodeFacts:
    """Return the facts from the result of ``as_record``.

    Raises:
        NetworkError: the record is invalid; the text names the field.
    """
    try:
        return TypeAdapter(NodeFacts).validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise NetworkError(
            f"recorded facts: {place}: {first['msg']}; record them with `hpcrun nccl advise --record`"
        ) from error
