"""The address under which the other hosts of a job reach this one.

Debian and Ubuntu give a host's own name the address 127.0.1.1 in /etc/hosts. Who binds to that (gloo,
the store of a process group) is out of the others' reach, and they wait for their time-out.
"""

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence

from hpcrun.cluster.launchers import step_hosts

# "discard": connecting a datagram socket sends nothing, it only has the kernel choose a route.
_ANY_PORT = 9


def is_only_loopback(name: str) -> bool:
    """Whether ``name`` resolves, and to nothing but addresses that end on this host."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in found)


def outward_address(peers: Sequence[str]) -> str | None:
    """This host's address on the way to the first of ``peers`` that is another one; None without any."""
    for peer in peers:
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)[
                0
            ]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                own = str(probe.getsockname()[0])
            if not ipaddress.ip_address(own).is_loopback:
                return own
    return None


def reachable(name: str, environ: Mapping[str, str]) -> str:
    """``name``, or where that is only loopback here, the address under which the step's hosts reach it."""
    if not is_only_loopback(name):
        return name
    return outward_address(step_hosts(environ)) or name


def gloo_interface(environ: Mapping[str, str]) -> dict[str, str]:
    """``GLOO_SOCKET_IFNAME`` for a step over several hosts whose own name gloo must not trust; else {}."""
    hosts = step_hosts(environ)
    if len(hosts) < 2 or "GLOO_SOCKET_IFNAME" in environ:
        return {}
    if not is_only_loopback(socket.gethostname()):
        return {}
    own = outward_address(hosts)
    name = None if own is None else _interface_of(own)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}


def _interface_of(address: str) -> str | None:
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    return None
