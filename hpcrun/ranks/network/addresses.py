"""The addresses at which the other hosts of a job reach this host.

A host's own name is unreliable. Debian maps it to 127.0.1.1 in /etc/hosts, clouds often do not resolve it,
and on a node with several networks it may belong to a network that the other nodes do not have.
"""

import contextlib
import ipaddress
import socket
from collections.abc import Iterable

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
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_link_local(address: str) -> bool:
    """Return True if a numeric address is valid on one cable only (169.254.x.x, fe80::)."""
    return ipaddress.ip_address(address.partition("%")[0]).is_link_local


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
