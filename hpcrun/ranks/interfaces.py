"""The network interfaces of this host: those for the rendezvous, and those for gloo and NCCL."""

import contextlib
import ipaddress
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from hpcrun.errors import NodeUnfit
from hpcrun.ranks.addresses import (
    bound_address,
    is_loopback,
    is_only_loopback,
    is_sound,
    listen,
    outward_address,
)
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.run.endings import node_name
from hpcrun.slurm.placement import LOOPBACK, in_local_cluster, step_hosts


def own_interfaces() -> dict[str, list[str]]:
    """Return the addresses of each interface that is up: IPv4 first, neither loopback nor link-local.

    A link-local address (169.254.x.x, fe80::) often leads only to the host's management controller.
    """
    import psutil

    state = psutil.net_if_stats()
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        if name in state and not state[name].isup:
            continue
        addresses = [
            entry.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in entries
            if entry.family == family and "%" not in entry.address
        ]
        routed = [
            address
            for address in addresses
            if not is_loopback(address) and not ipaddress.ip_address(address).is_link_local
        ]
        if routed:
            found[name] = routed
    return found


def chosen_interfaces(wanted: str, names: Iterable[str]) -> list[str]:
    """Return the ``names`` that ``wanted`` selects, as NCCL reads NCCL_SOCKET_IFNAME.

    ``wanted`` is a comma-separated list of prefixes. After ``=`` they are full names, and after ``^`` or
    ``^=`` the matching interfaces are excluded. Names come in the order of the list.
    """
    excluding = wanted.startswith("^")
    rest = wanted.removeprefix("^")
    exact = rest.startswith("=")
    patterns = [part.strip() for part in rest.removeprefix("=").split(",") if part.strip()]

    def matches(name: str, pattern: str) -> bool:
        return name == pattern if exact else name.startswith(pattern)

    names = list(names)
    if excluding:
        return [name for name in names if not any(matches(name, it) for it in patterns)]
    return list(dict.fromkeys(name for it in patterns for name in names if matches(name, it)))


def interface_variables(
    wanted: str, environ: Mapping[str, str], interfaces: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return variables that make gloo and NCCL use the interfaces in ``wanted``, unless they are set.

    NCCL reads ``wanted`` itself. gloo takes full names only, so it gets the first interface found.

    Raises:
        NodeUnfit: this host has no such interface.
    """
    chosen = chosen_interfaces(wanted, interfaces)
    if not chosen:
        have = ", ".join(f"{name} ({own[0]})" for name, own in interfaces.items()) or "none"
        raise NodeUnfit(
            f"{socket.gethostname()}: job.interface={wanted} names no interface of this node that is up "
            f"and has an address; it has {have}; correct job.interface, or exclude the node (job.exclude)"
        )
    found = {"GLOO_SOCKET_IFNAME": chosen[0], "NCCL_SOCKET_IFNAME": wanted}
    return {name: value for name, value in found.items() if not environ.get(name)}


def rendezvous_addresses(
    environ: Mapping[str, str],
    wanted: str | None = None,
    interfaces: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Return the names and addresses of this host for the other ranks to try, best first.

    Args:
        environ: the environment of rank 0.
        wanted: ``job.interface``.
        interfaces: the addresses of this host by interface; None: from the kernel.

    MASTER_ADDR comes first, then the wanted interfaces, then names that are reachable here, then numeric
    addresses, then names that only other hosts may know.
    """
    if in_local_cluster(environ):
        return [LOOPBACK]
    interfaces = own_interfaces() if interfaces is None else interfaces
    chosen = chosen_interfaces(wanted, interfaces) if wanted else []
    hosts = step_hosts(environ)
    names = [environ.get("SLURMD_NODENAME", ""), socket.gethostname()]
    sound = [name for name in names if name and is_sound(name)]
    given = environ.get("MASTER_ADDR", "")
    outward = outward_address(hosts)
    found = [
        *([given] if given and not (len(hosts) > 1 and is_only_loopback(given)) else []),
        *(address for name in chosen for address in interfaces[name]),
        *sound,
        *([outward] if outward else []),
        *(address for addresses in interfaces.values() for address in addresses),
        *names,
        *([LOOPBACK] if len(hosts) < 2 else []),
    ]
    return list(dict.fromkeys(name for name in found if name))


def gloo_interface(
    environ: Mapping[str, str],
    peers: Sequence[str],
    interfaces: Mapping[str, Sequence[str]] | None = None,
    *,
    several: bool = False,
) -> dict[str, str]:
    """Return ``GLOO_SOCKET_IFNAME`` if gloo would bind an address that ``peers`` cannot reach; else {}.

    gloo binds the first usable address of the host name, and a loopback address if there is
    none. ``peers`` are the step's other hosts, by name or, better, by an address that was seen to work.
    ``several``: there are several hosts, although no step names them.
    """
    if "GLOO_SOCKET_IFNAME" in environ or not (several or len(step_hosts(environ)) > 1):
        return {}
    interfaces = own_interfaces() if interfaces is None else interfaces
    by_address = {address: name for name, own in interfaces.items() for address in own}
    bound = bound_address(socket.gethostname())
    sound = bound is not None and not is_loopback(bound)
    outward = outward_address(peers) or (None if sound else next(iter(by_address), None))
    name = by_address.get(outward or "")
    if name is None or (sound and by_address.get(bound or "") == name):
        return {}
    return {"GLOO_SOCKET_IFNAME": name}


def nccl_interface(
    environ: Mapping[str, str], interfaces: Mapping[str, Sequence[str]]
) -> str | None:
    """Return the interface with which NCCL connects the ranks; None if NCCL finds none.

    Source: ``ncclFindInterfaces`` in NCCL's ``src/misc/socket.cc``.
    """
    given = environ.get("NCCL_SOCKET_IFNAME")
    for wanted in [given] if given else ["ib", "^docker,lo,virbr", "docker,lo,virbr"]:
        chosen = chosen_interfaces(wanted, interfaces)
        if chosen:
            return next(name for name in interfaces if name in chosen)
    return None


_NEXT = 64
"""The most nodes that a node tries, in the order of the nodes: each one costs a thread for seconds."""


class NodeLinks:
    """Connections to other nodes by TCP, tried after a hang in NCCL's connection, since NCCL names no node.

    The first rank of each node listens while NCCL connects. Other ranks and single nodes do nothing.
    """

    def __init__(self, config: DistributedConfig) -> None:
        self._node = config.node_rank
        near = range(self._node + 1, self._node + min(_NEXT + 1, config.num_nodes))
        self._others = [node % config.num_nodes for node in near if config.local_rank == 0]

    @contextlib.contextmanager
    def open(self, write: Callable[[str, str], None]) -> Iterator[None]:
        """Listen within the block; ``write`` publishes the address as the note of a key."""
        interfaces = own_interfaces() if self._others else {}
        name = nccl_interface(os.environ, interfaces)
        if name is None:
            yield
            return
        with listen([0]) as listener:
            port = listener.getsockname()[1]
            write(f"link/{self._node}", json.dumps([node_name(), name, interfaces[name][0], port]))
            yield
            write(f"link/{self._node}", "")

    def broken(self, read: Callable[[str], str | None], patience: float) -> dict[str, str] | None:
        """Return the nodes that do not accept a connection, with the address of each; None: nothing to try.

        Args:
            read: returns the note of a key; nothing of a node that does not listen.
            patience: seconds for all connections, which are tried at the same time.
        """
        notes = [note for node in self._others if (note := read(f"link/{node}"))]
        if not notes:
            return None

        def error(note: str) -> tuple[str, str] | None:
            host, name, address, port = json.loads(note)
            try:
                socket.create_connection((address, port), patience).close()
            except OSError as error:
                return host, f"{address} (interface {name}: {error.strerror or error})"
            return None

        with ThreadPoolExecutor(len(notes)) as pool:
            return dict(filter(None, pool.map(error, notes)))
