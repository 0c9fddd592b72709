"""Choose rendezvous ports that neither the kernel nor a neighbouring job is likely to hold.

Ports of the ephemeral range are handed out by the kernel to any outgoing connection, so a port
computed there collides now and then (the classic ``job_id % 16384 + 49152``). These lie below it,
and are a function of the job id alone, so that every rank finds the same ones without talking.
"""

import contextlib
import errno
import hashlib
import math
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcrun.cluster.errors import ClusterError

_BACKLOG = 2048

FIRST_PORT = 10000
"""Registered services crowd the ports below; avoided where there is room above."""

_LAST_PORT = 65535
_FIRST_UNPRIVILEGED = 1024
_DEFAULT_EPHEMERAL = (32768, 60999)


def ephemeral_range(path: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> tuple[int, int]:
    """Return the first and last port that the kernel gives to outgoing connections (ip(7)).

    Linux's default of 32768 to 60999 is returned where the file cannot be read.
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
        ephemeral: the kernel's range, first and last; read from this machine when None.

    The ports are at least 10000 and below the ephemeral range; where a site has stretched that
    range down, they are taken from 1024 up, or from above the range, or from all of it when it
    leaves no room at all.
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
    # A stride without a common factor visits every port of the pool once before it repeats.
    while math.gcd(stride, len(pool)) != 1:
        stride += 1
    return [pool[(start + i * stride) % len(pool)] for i in range(count)]


def wanted_ports(environ: Mapping[str, str], key: str) -> list[int]:
    """Return the ports that rank 0 tries in order: MASTER_PORT, where that is set, and the candidates."""
    given = environ.get("MASTER_PORT", "")
    return [*([int(given)] if given.isdecimal() else []), *port_candidates(key)]


def listen(ports: Sequence[int]) -> socket.socket:
    """Return a socket that listens on the first of ``ports`` that is free, on all addresses of this host.

    Which of them the other ranks reach is for them to find out.

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
        "be bound; look with `ss -ltn` at what holds them"
    )


def is_free(host: str, port: int) -> bool:
    """Tell whether a server could listen on ``port`` of ``host`` now, by listening for a moment.

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
        # IPv6 may resolve and yet be switched off: nothing of ours will listen there either.
        return True
    with server:
        # As the real listener does: a port in TIME_WAIT is no obstacle, a listening one is.
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
