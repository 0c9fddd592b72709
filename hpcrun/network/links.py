"""The network of a node: the identity of the other nodes, round trips and throughput over TCP.

Nodes listen on ephemeral ports, as NCCL and gloo do.
"""

import contextlib
import json
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from hpcrun.ranks.interfaces import own_interfaces

TRIES, TRY = 3, 3.5
"""Seconds for a connection to a port that may be closed: a lost segment is sent again after one and three."""
CONNECT = 8.0
"""Seconds for a connection: three consecutive lost segments take seven."""
_ANSWER = 5.0
_NAMES_AT_ONCE, _NAMES_IN_A_LINE = 16, 8
_CHUNK = 1 << 20
_LINE = 4096
_PINGS = 11
# struct tcp_info of Linux: total_retrans, and segs_out since Linux 4.2.
_RESENT, _SENT = 100, 136


class Links:
    """This node for the other nodes: it listens for them, and measures the way to them.

    A peer is a mapping with the ``name``, ``port`` and ``addresses`` of a node, and the ``address`` to use.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._rates: dict[tuple[int, str], list[float]] = {}
        self._arrived = threading.Condition()
        self._peers: dict[str, Mapping[str, Any]] = {}
        self._token = ""
        self._held: list[socket.socket] = []
        self._port = 0

    def listen(self) -> dict[str, Any]:
        """Start to listen; return the port and the own addresses."""
        server = listener()
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()
        found = [one for addresses in own_interfaces().values() for one in addresses]
        # IPv4 first, because host files mostly contain IPv4 addresses.
        addresses = sorted(found, key=lambda one: ":" in one)[:16]
        self._port = server.getsockname()[1]
        return {"port": self._port, "addresses": addresses}

    def meet(self, peers: Sequence[Mapping[str, Any]], token: str) -> None:
        """Remember the other nodes. A node answers only connections with the ``token``."""
        self._peers = {peer["name"]: peer for peer in peers if peer["name"] != self.name}
        self._token = token

    def names(self) -> Iterator[list[dict[str, Any]]]:
        """Check the name of every other node. A line of srun's output must not grow with their number."""
        with ThreadPoolExecutor(_NAMES_AT_ONCE) as pool:
            checks = list(pool.map(self._check_name, self._peers.values()))
        for first in range(0, len(checks), _NAMES_IN_A_LINE):
            yield checks[first : first + _NAMES_IN_A_LINE]

    def exchange(
        self, number: int, pairs: Sequence[Sequence[str]], seconds: float, streams: int
    ) -> dict[str, Any]:
        """Exchange data with this round's partner in both directions simultaneously; return the rates."""
        (partner,) = {name for pair in pairs if self.name in pair for name in pair} - {self.name}
        header = {"kind": "bulk", "round": number, "from": self.name, "seconds": seconds}
        with ThreadPoolExecutor(streams) as pool:
            jobs = [pool.submit(self._send, self._peers[partner], header) for _ in range(streams)]
            received = self._received((number, partner), streams, seconds + CONNECT, jobs)
            sent = [job.result() for job in jobs]
        shares = [one["lost"] for one in sent if one.get("lost") is not None]
        return {
            "received": received,
            "connected": any(one["connected"] for one in sent),
            "refused": any(one.get("refused") for one in sent),
            "lost": max(shares, default=None),
        }

    def loopback_rate(self, number: int, seconds: float, streams: int) -> float | None:
        """Return the bit/s that this node sends to itself: what its processors can do at present."""
        header = {"kind": "bulk", "round": number, "from": self.name, "seconds": seconds}
        own = {"address": "127.0.0.1", "port": self._port}
        with ThreadPoolExecutor(streams) as pool:
            jobs = [pool.submit(self._send, own, header) for _ in range(streams)]
            return self._received((number, self.name), streams, seconds + CONNECT, jobs)

    def hold(self, ports: Sequence[int]) -> list[int]:
        """Listen on those of ``ports`` that are free here, and return them."""
        for port in ports:
            with contextlib.suppress(OSError):
                server = listener(port)
                self._held.append(server)
                threading.Thread(target=self._accept, args=(server,), daemon=True).start()
        return [server.getsockname()[1] for server in self._held]

    def release(self) -> None:
        """Stop to listen on the held ports."""
        for server in self._held:
            # A close does not wake the thread that accepts, and the port would stay open.
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
        self._held.clear()

    def reach(self, target: str, ports: Sequence[int]) -> dict[str, list[int]]:
        """Return the ports of ``target`` that cannot be reached from here."""
        found: dict[str, list[int]] = {"refused": [], "unreachable": []}
        with ThreadPoolExecutor(max(1, len(ports))) as pool:
            problems = pool.map(lambda port: self._port_problem(target, port), ports)
            for port, problem in zip(ports, problems, strict=True):
                if problem:
                    found[problem].append(port)
        return found

    def _port_problem(self, target: str, port: int) -> str | None:
        # Lost segments look like a firewall, hence further tries.
        for _ in range(TRIES):
            try:
                address = self._peers[target]["address"]
                with self._connect(address, port, {"kind": "ping"}, TRY) as link:
                    if read_line(link, TRY).get("node") == target:
                        return None
            except ConnectionRefusedError:
                return "refused"
            except (OSError, ValueError):
                continue
        return "unreachable"

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = server.accept()
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        """Answer one connection: send the name of this node, then echo or count the received bytes."""
        with link, contextlib.suppress(OSError, ValueError, KeyError):
            header = read_line(link, _ANSWER)
            if not self._token or header.get("token") != self._token:
                return
            if header["kind"] == "ping":
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.sendall(json.dumps({"node": self.name}).encode() + b"\n")
                echo(link, _ANSWER)
            elif header["kind"] == "bulk":
                rate = receive_for(link, header["seconds"])
                drop(link)
                with self._arrived:
                    self._rates.setdefault((header["round"], header["from"]), []).append(rate)
                    self._arrived.notify_all()

    def _check_name(self, peer: Mapping[str, Any]) -> dict[str, Any]:
        """Resolve the name of ``peer``, and ask the node at this address for its name."""
        found: dict[str, Any] = {"target": peer["name"]}
        try:
            entries = socket.getaddrinfo(peer["name"], peer["port"], type=socket.SOCK_STREAM)
        except OSError:
            return found | {"problem": "unresolved"}
        found["address"] = address = str(entries[0][4][0])
        known = address in peer["addresses"]
        try:
            with self._connect(address, peer["port"], {"kind": "ping"}, CONNECT) as link:
                if read_line(link, _ANSWER).get("node") != peer["name"]:
                    return found | {"problem": "wrong"}
                median, least = round_trip(link, _ANSWER)
                return found | {"seconds": median, "least": least}
        except ConnectionRefusedError:
            return found | {"problem": "refused" if known else "wrong"}
        except (OSError, ValueError):
            return found | {"problem": "unreachable" if known else "wrong"}

    def _connect(
        self, address: str, port: int, header: Mapping[str, Any], timeout: float
    ) -> socket.socket:
        """Open a connection and send ``header`` as its first line; raises OSError."""
        link = socket.create_connection((address, port), timeout)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(json.dumps({**header, "token": self._token}).encode() + b"\n")
        return link

    def _send(self, peer: Mapping[str, Any], header: Mapping[str, Any]) -> dict[str, Any]:
        try:
            link = self._connect(peer["address"], peer["port"], header, CONNECT)
        except ConnectionRefusedError:
            return {"connected": False, "refused": True}
        except OSError:
            return {"connected": False}
        lost = send_for(link, header["seconds"] + 2.0)
        drop(link)
        return {"connected": True, "lost": lost}

    def _received(
        self, key: tuple[int, str], streams: int, seconds: float, jobs: "list[Future[Any]]"
    ) -> float | None:
        """Return the sum of the streams' rates; None if there are none."""
        with self._arrived:
            self._arrived.wait_for(lambda: len(self._rates.get(key, ())) >= streams, seconds)
        wait(jobs)
        with self._arrived:
            rates = self._rates.pop(key, None)
        return None if rates is None else sum(rates)


def listener(port: int = 0) -> socket.socket:
    """Return a socket that listens on all interfaces, with IPv6 if available; raises OSError.

    Args:
        port: 0 means any free port.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256
            )
    return socket.create_server(("", port), backlog=256)


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


def round_trip(link: socket.socket, timeout: float) -> tuple[float, float]:
    """Return the median and the shortest round trip of a byte in seconds; the peer runs `echo`.

    A link that loses packets gets fewer tries, so that the measurement ends after about ``timeout`` seconds.
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
    return statistics.median(seconds), min(seconds)


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
    link.settimeout(seconds + _ANSWER)
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
