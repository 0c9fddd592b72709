"""The built-in measurements over TCP: the peer's identity, round trips, and throughput."""

import contextlib
import json
import socket
import statistics
import struct
import time
from collections.abc import Mapping
from typing import Any

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
