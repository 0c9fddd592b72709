"""The ports that a run uses between its nodes: their choice, the listeners, and the attempts to connect.

Rank 0 listens on MASTER_PORT, or on a port below the kernel's ephemeral range. NCCL and gloo listen on
ephemeral ports. A firewall often closes the ports of one kind only.
"""

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from hpcrun.network.check import wire
from hpcrun.ranks.network.ports import FIRST_PORT, ephemeral_range, wanted_ports

PATIENCE = 3.5
"""Seconds for a connection: a lost segment is sent again after one second, and after three."""
TRIES = 2
AT_ONCE = 64
_OF_RANK_0, _EPHEMERAL = 12, 12

Problem = Literal["refused", "unreachable"]


def tried_ports(environ: Mapping[str, str], key: str) -> list[int]:
    """Return the ports to try, in order: MASTER_PORT if it is set, and a sample of both ranges.

    The sample has the first and the last port of each range, so that a closed range is seen whole.

    Args:
        environ: the environment of the check.
        key: any text; another key gives another sample of rank 0's range.
    """
    low, high = ephemeral_range()
    step = max(1, (high - low) // (_EPHEMERAL - 1))
    ephemeral = [*list(range(low, high, step))[: _EPHEMERAL - 1], high]
    edges = [FIRST_PORT, low - 1] if low > FIRST_PORT else []
    of_rank_0 = wanted_ports(environ, key)[:_OF_RANK_0]
    return sorted(port for port in {*of_rank_0, *edges, *ephemeral} if 0 < port < 1 << 16)


def hold(ports: Sequence[int]) -> list[socket.socket]:
    """Return listeners on the free ports among ``ports``."""
    held = []
    for port in ports:
        with contextlib.suppress(OSError):
            held.append(listener(port))
    return held


def release(held: Sequence[socket.socket]) -> None:
    """Close the listeners ``held``."""
    for server in held:
        # A close does not wake the thread that accepts, and the port would stay open.
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()


def listener(port: int = 0) -> socket.socket:
    """Return a socket that listens on all interfaces, with IPv6 if available; 0: any free port.

    Raises:
        OSError: the port is taken.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256
            )
    return socket.create_server(("", port), backlog=256)


def failures(
    peer: Mapping[str, Any], ports: Sequence[int], ping: Callable[[str, int, float], socket.socket]
) -> dict[str, list[int]]:
    """Return the ports of ``peer`` that cannot be reached from here, by problem.

    Args:
        peer: name and address of a node that holds ``ports``.
        ports: those to try.
        ping: connects to an address and a port within some seconds, and asks who answers.
    """
    found: dict[str, list[int]] = {"refused": [], "unreachable": []}
    if not ports:
        return found
    with ThreadPoolExecutor(min(AT_ONCE, len(ports))) as pool:
        for port, problem in zip(
            ports, pool.map(lambda port: _problem(peer, port, ping), ports), strict=True
        ):
            if problem is not None:
                found[problem].append(port)
    return found


def _problem(
    peer: Mapping[str, Any], port: int, ping: Callable[[str, int, float], socket.socket]
) -> Problem | None:
    for _ in range(TRIES):
        try:
            with ping(peer["address"], port, PATIENCE) as link:
                if wire.read_line(link, PATIENCE).get("node") == peer["name"]:
                    return None
        except ConnectionRefusedError:
            return "refused"
        except (OSError, ValueError):
            # Lost segments can look like a firewall, hence the second try.
            continue
    return "unreachable"
