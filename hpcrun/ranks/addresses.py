"""The addresses at which the other hosts of a job reach this host.

A host's own name is unreliable. Debian maps it to 127.0.1.1 in /etc/hosts, clouds often do not resolve it,
and on a node with several networks it may belong to a network that the other nodes do not have.

The kernel gives ports of the ephemeral range to any outgoing connection, so a port
computed there sometimes collides (the classic ``job_id % 16384 + 49152``). These ports are below that
range and depend only on the job id, so every rank computes the same ports without communication.
"""

import contextlib
import errno
import hashlib
import ipaddress
import math
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hpcrun.errors import ClusterError

# "discard": connecting a datagram socket sends nothing; the kernel only chooses a route.
_ANY_PORT = 9


def addresses_of(name: str) -> list[str]:
    """Return the numeric addresses of ``name`` in the resolver's order; empty if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]) for entry in found]


def is_loopback(address: str) -> bool:
    """Return True if a numeric address ends on the host that uses it."""
    found = ipaddress.ip_address(address.partition("%")[0])
    # A server for IPv4 and IPv6 sees IPv4 as ::ffff:127.0.0.1, no loopback before Python 3.13.
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def is_own(address: str) -> bool:
    """Return True if a numeric address belongs to this host, loopback included."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(socket.getaddrinfo(address, 0, family, socket.SOCK_DGRAM)[0][4])
    except OSError:
        return False
    return True


def bound_address(name: str) -> str | None:
    """Return the first address of ``name`` that a program can bind here; gloo takes the same address."""
    return next((address for address in addresses_of(name) if is_own(address)), None)


def is_sound(name: str) -> bool:
    """Return True if other hosts can reach a program that binds to ``name`` here."""
    address = bound_address(name)
    return address is not None and not is_loopback(address)


def outward_address(peers: Iterable[str]) -> str | None:
    """Return this host's address on the route to the first of ``peers`` that is another host, if any is."""
    for peer in peers:
        with contextlib.suppress(OSError, UnicodeError):
            family, _, _, _, address = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)[
                0
            ]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                own = str(probe.getsockname()[0])
            if not is_loopback(own) and not is_own(str(address[0])):
                return own
    return None


def is_only_loopback(name: str) -> bool:
    """Return True if ``name`` resolves, and only to loopback addresses."""
    found = addresses_of(name)
    return bool(found) and all(map(is_loopback, found))


_BACKLOG = 2048

FIRST_PORT = 10000
"""Registered services use many ports below this number."""

_LAST_PORT = 65535
_DEFAULT_EPHEMERAL = (32768, 60999)


def ephemeral_range(path: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> tuple[int, int]:
    """Return the first and last port that the kernel gives to outgoing connections (ip(7)).

    Linux's default of 32768 to 60999 is returned if the file cannot be read.
    """
    try:
        low, high = path.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return _DEFAULT_EPHEMERAL


def port_candidates(
    job_id: str, count: int = 32, ephemeral: tuple[int, int] | None = None
) -> list[int]:
    """Return ``count`` different ports to try in order, the same for the same job id everywhere.

    Args:
        job_id: any text; ``123_4`` of a job array gives other ports than ``123_5``.
        count: how many ports.
        ephemeral: the kernel's range, first and last; None: read from this machine.

    The ports are at least 10000 and below the ephemeral range, or in it if a site has extended the range
    downward.
    """
    low, _ = ephemeral or ephemeral_range()
    pool = range(FIRST_PORT, low if low >= FIRST_PORT + count else _LAST_PORT + 1)
    digest = hashlib.blake2b(job_id.encode(), digest_size=16).digest()
    start = int.from_bytes(digest[:8], "big") % len(pool)
    stride = int.from_bytes(digest[8:], "big") % len(pool)
    # A stride coprime to the pool's size visits every port once before it repeats.
    while math.gcd(stride, len(pool)) != 1:
        stride += 1
    return [pool[(start + i * stride) % len(pool)] for i in range(count)]


def wanted_ports(environ: Mapping[str, str], key: str) -> list[int]:
    """Return the ports that rank 0 tries in order: MASTER_PORT, if that is set, and the candidates."""
    given = environ.get("MASTER_PORT", "")
    return [*([int(given)] if given.isdecimal() else []), *port_candidates(key)]


def listen(ports: Sequence[int]) -> socket.socket:
    """Return a socket that listens on the first of ``ports`` that is free, on all addresses of this host.

    The other ranks find out which of the addresses they can reach.

    Raises:
        ClusterError: none of the ports is free.
    """
    for port in ports:
        with contextlib.suppress(OSError):
            return _server("", port)
    raise ClusterError(
        f"{socket.gethostname()}: none of the ports {', '.join(map(str, ports[:4]))} … that were tried can "
        "be bound; `ss -ltn` shows the processes that use them"
    )


def is_free(host: str, port: int) -> bool:
    """Return True if a server could listen on ``port`` of ``host`` now, by listening for a moment.

    ``host`` is an address of this machine; "" means all interfaces, where torch.distributed's store listens.
    """
    try:
        _server(host, port).close()
    except OSError:
        return False
    return True


def _server(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``port``, with IPv6 where the kernel allows its use; raises OSError."""
    if not host and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise
    return socket.create_server((host, port), backlog=_BACKLOG)
