"""Choose rendezvous ports that neither the kernel nor another job is likely to hold.

The kernel gives ports of the ephemeral range to any outgoing connection, so a port
computed there sometimes collides (the classic ``job_id % 16384 + 49152``). These ports are below that
range and depend only on the job id, so every rank computes the same ports without communication.
"""

import contextlib
import errno
import hashlib
import math
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcrun.errors import ClusterError

_BACKLOG = 2048

FIRST_PORT = 10000
"""Registered services use many ports below this number; it is exceeded if there is room above."""

_LAST_PORT = 65535
_FIRST_UNPRIVILEGED = 1024
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

    The ports are at least 10000 and below the ephemeral range. If a site has extended that
    range downward, they start at 1024, or are above the range, or come from all of it if it
    leaves no room.
    """
    low, high = ephemeral or ephemeral_range()
    pools = [
        range(FIRST_PORT, low),
        range(_FIRST_UNPRIVILEGED, low),
        range(max(high + 1, _FIRST_UNPRIVILEGED), _LAST_PORT + 1),
        range(FIRST_PORT, _LAST_PORT + 1),
    ]
    pool = next(ports for ports in pools if len(ports) >= count)
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
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for port in ports:
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
            )
    raise ClusterError(
        f"{socket.gethostname()}: none of the ports {', '.join(map(str, ports[:4]))} … that were tried can "
        "be bound; `ss -ltn` shows the processes that use them"
    )


def is_free(host: str, port: int) -> bool:
    """Return True if a server could listen on ``port`` of ``host`` now, by listening for a moment.

    ``host`` is a name or address of this machine; "" means all interfaces, which is where
    torch.distributed's store listens.

    Raises:
        ClusterError: the host does not resolve, or is not this machine.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ClusterError(
            f"host {host!r} does not resolve on this machine ({error}); use a name that it knows"
        ) from error
    return all(_can_listen(family, address, host) for family, _, _, _, address in found)


def _can_listen(family: int, address: object, host: str) -> bool:
    try:
        server = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        # IPv6 may resolve and yet be disabled: hpcrun will not listen there either.
        return True
    with server:
        # Like the real listener: a port in TIME_WAIT does not count as used, a listening port does.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            server.bind(address)  # type: ignore[arg-type]
            server.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            if error.errno == errno.EADDRNOTAVAIL and family == socket.AF_INET6:
                return True
            raise ClusterError(
                f"cannot listen on {host or 'this machine'}: {error.strerror}; "
                "the rendezvous address must be one of this machine's own"
            ) from error
    return True
