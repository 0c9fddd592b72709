"""The built-in measurements over TCP: the peer's identity, round trips, and throughput.

Rank 0 listens on MASTER_PORT, or on a port below the kernel's ephemeral range. NCCL and gloo listen on
ephemeral ports. A firewall often closes the ports of one kind only.
"""

import contextlib
import json
import socket
import statistics
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from hpcrun.ranks.addresses import FIRST_PORT, ephemeral_range, wanted_ports

_CHUNK = 1 << 20
_LINE = 4096
_FIRST_BYTE = 5.0
_PINGS = 11
# struct tcp_info of Linux: total_retrans, and segs_out since Linux 4.2.
_RESENT, _SENT = 100, 136


def connect(address: str, port: int, header: Mapping[str, Any], timeout: float) -> socket.socket:
    """Open a connection and send ``header`` as its first line.

    Raises:
        OSError: no process listens, or none within ``timeout`` seconds.
    """
    link = socket.create_connection((address, port), timeout)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(json.dumps(header).encode() + b"\n")
    return link


def read_line(link: socket.socket, timeout: float) -> dict[str, Any]:
    """Read one JSON line byte by byte, so that the bytes after it stay in the socket.

    Raises:
        OSError: the line does not come within ``timeout`` seconds.
        ValueError: the line is not a JSON object.
    """
    link.settimeout(timeout)
    text = b""
    while not text.endswith(b"\n") and len(text) < _LINE:
        byte = link.recv(1)
        if not byte:
            raise ConnectionError("closed before its first line")
        text += byte
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("the first line is not a JSON object")
    return found


def round_trip(link: socket.socket, timeout: float) -> float:
    """Return the median round trip of a byte in seconds; the peer runs `echo`.

    A link that loses packets gets fewer tries, so that the measurement still ends after about ``timeout``
    seconds.
    """
    link.settimeout(timeout)
    seconds: list[float] = []
    end = time.perf_counter() + timeout
    while len(seconds) < _PINGS and (not seconds or time.perf_counter() < end):
        begun = time.perf_counter()
        link.sendall(b"p")
        if not link.recv(1):
            raise ConnectionError("closed while it was measured")
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def echo(link: socket.socket, timeout: float) -> None:
    """Send all received bytes back, until the peer closes."""
    link.settimeout(timeout)
    with contextlib.suppress(OSError):
        while data := link.recv(64):
            link.sendall(data)


def send_for(link: socket.socket, seconds: float) -> float | None:
    """Send zeros for ``seconds`` or until the peer closes; return the fraction of retransmitted segments."""
    end = time.monotonic() + seconds
    data = memoryview(bytes(_CHUNK))
    with contextlib.suppress(OSError):
        while (left := end - time.monotonic()) > 0:
            link.settimeout(left)
            link.send(data)
    return resent(link)


def receive_for(link: socket.socket, seconds: float) -> float:
    """Return the bits per second that arrive within ``seconds`` of the first byte; 0.0 for none."""
    buffer = bytearray(_CHUNK)
    total, closed = 0, False
    # The first byte may wait for the retransmission of a lost segment.
    link.settimeout(seconds + _FIRST_BYTE)
    begun = now = time.monotonic()
    try:
        if not link.recv_into(buffer, 1):
            return 0.0
        begun = now = time.monotonic()
        while (left := begun + seconds - now) > 0:
            link.settimeout(left)
            count = link.recv_into(buffer)
            now = time.monotonic()
            total += count
            if not count:
                closed = True
                break
    except OSError as error:
        # A link that stalls used the full time, a link that breaks did not.
        closed = not isinstance(error, TimeoutError)
    elapsed = max(now - begun, 1e-3) if closed else seconds
    return total * 8 / elapsed


def resent(link: socket.socket) -> float | None:
    """Return the fraction of retransmitted segments; None if the kernel does not report it."""
    try:
        info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    except OSError:
        return None
    if len(info) < _SENT + 4:
        return None
    (again,) = struct.unpack_from("I", info, _RESENT)
    (sent,) = struct.unpack_from("I", info, _SENT)
    return again / sent if sent else None


def drop(link: socket.socket) -> None:
    """Close without waiting for data that is still on its way."""
    with contextlib.suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


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
                if read_line(link, PATIENCE).get("node") == peer["name"]:
                    return None
        except ConnectionRefusedError:
            return "refused"
        except (OSError, ValueError):
            # Lost segments can look like a firewall, hence the second try.
            continue
    return "unreachable"
