"""The part of a check that runs on every node, one task per node: ``python -m hpcrun.network.check.agent``.

Orders are JSON lines on standard input, answers are JSON lines on standard output. srun forwards both, so
that the check can be controlled even if the checked names and links fail.
"""

import bisect
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any, TextIO

from hpcrun.network.check import wire
from hpcrun.network.check import wire as ports
from hpcrun.network.check.all_reduce import NodeRanks
from hpcrun.ranks.addresses import AnswerServer, Listener, reached
from hpcrun.ranks.interfaces import own_interfaces

CONNECT = 8.0
"""Seconds for a connection: three consecutive lost segments take seven."""
_ANSWER = 5.0
_NAMES_AT_ONCE = 16


class NetcheckAgent:
    """One node: it listens for the other nodes, and answers each order."""

    def __init__(self, name: str, index: int, out: TextIO) -> None:
        self.name, self.index, self._out = name, index, out
        self._lock = threading.Lock()
        self._rates: dict[tuple[int, int], list[float]] = {}
        self._arrived = threading.Condition()
        self._peers: list[dict[str, Any]] = []
        self._token = ""
        self._ranks = NodeRanks()
        self._doorkeeper = AnswerServer(own_interfaces())
        self._held: list[socket.socket] = []
        self._listener = ports.listener()
        self._start_to_accept(self._listener)

    def say(self, **facts: Any) -> None:
        """Print one answer."""
        with self._lock:
            print(
                json.dumps({"node": self.name, "index": self.index, **facts}),
                file=self._out,
                flush=True,
            )

    def hello(self) -> None:
        """Report the name and address of this node."""
        port = self._listener.getsockname()[1]
        door = asdict(self._doorkeeper.door)
        equipped = installed()
        self.say(type="hello", port=port, addresses=own_addresses(), iperf3=equipped, door=door)

    def obey(self, order: Mapping[str, Any]) -> bool:
        """Carry out one order; return False for the last order."""
        if order["type"] == "peers":
            self._peers, self._token = order["peers"], order["token"]
            self.say(type="ready")
        elif order["type"] == "names":
            self._check_names()
        elif order["type"] == "interfaces":
            doors = {int(index): Listener(**door) for index, door in order["doors"].items()}
            own = self._doorkeeper.interfaces
            peers = [door for index, door in doors.items() if index != self.index]
            self.say(type="interfaces", names=reached(own, peers))
        elif order["type"] == "hold":
            self._hold(order["ports"])
        elif order["type"] == "reach":
            self._reach(order)
        elif order["type"] == "round":
            self._round(order)
        elif order["type"] == "prepare" and self.index in order["nodes"]:
            self.say(type="prepare", **self._ranks.prepare())
        elif order["type"] == "collective":
            self._collective(order["groups"])
        return bool(order["type"] != "end")

    def _start_to_accept(self, server: socket.socket) -> None:
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                link, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        """Answer one connection: send the name of this node, then echo or count the received bytes."""
        with link, contextlib.suppress(OSError, ValueError, KeyError):
            header = wire.read_line(link, _ANSWER)
            if not self._token or header.get("token") != self._token:
                return
            if header["kind"] == "ping":
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.sendall(json.dumps({"node": self.name}).encode() + b"\n")
                wire.echo(link, _ANSWER)
            elif header["kind"] == "bulk":
                rate = wire.receive_for(link, header["seconds"])
                wire.drop(link)
                with self._arrived:
                    self._rates.setdefault((header["round"], header["from"]), []).append(rate)
                    self._arrived.notify_all()

    def _check_names(self) -> None:
        others = [peer for peer in self._peers if peer["index"] != self.index]
        with ThreadPoolExecutor(_NAMES_AT_ONCE) as pool:
            checks = list(pool.map(self._check_name, others))
        # Several lines: a line of srun's output must not grow with the number of nodes.
        for start in range(0, len(checks), 8):
            self.say(type="names", checks=checks[start : start + 8])
        self.say(type="names", checks=[], done=True)

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
            with self._ping(address, peer["port"], CONNECT) as link:
                if wire.read_line(link, _ANSWER).get("node") != peer["name"]:
                    return found | {"problem": "wrong"}
                return found | {"seconds": wire.round_trip(link, _ANSWER)}
        except ConnectionRefusedError:
            return found | {"problem": "refused" if known else "wrong"}
        except (OSError, ValueError):
            return found | {"problem": "unreachable" if known else "wrong"}

    def _ping(self, address: str, port: int, timeout: float) -> socket.socket:
        return wire.connect(address, port, {"kind": "ping", "token": self._token}, timeout)

    def _hold(self, wanted: Sequence[int]) -> None:
        """Listen on the free ports among ``wanted``; close the earlier listeners."""
        ports.release(self._held)
        self._held = ports.hold(wanted)
        for server in self._held:
            self._start_to_accept(server)
        self.say(type="hold", ports=[server.getsockname()[1] for server in self._held])

    def _reach(self, order: Mapping[str, Any]) -> None:
        """Try the ports on which the first node and the next nodes listen, and report the failures."""
        held = {int(index): found for index, found in order["held"].items()}
        for target in targets(self.index, sorted(held), order["first"]):
            peer = next(one for one in self._peers if one["index"] == target)
            found = ports.failures(peer, held[target], self._ping)
            self.say(type="reach", target=peer["name"], **found)
        self.say(type="reach", done=True)

    def _round(self, order: Mapping[str, Any]) -> None:
        """Exchange data with this round's partner in both directions simultaneously; report both rates."""
        partner = next(
            (b if a == self.index else a for a, b in order["pairs"] if self.index in (a, b)), None
        )
        if partner is None:
            return
        peer = next(one for one in self._peers if one["index"] == partner)
        if order["with"] == "iperf3":
            self.say(type="round", round=order["round"], **self._with_iperf(peer, order))
            return
        with ThreadPoolExecutor(order["streams"]) as pool:
            jobs = [pool.submit(self._send, peer, order) for _ in range(order["streams"])]
            received = self._received(order, partner, jobs)
            sent = [job.result() for job in jobs]
        shares = [one["lost"] for one in sent if one.get("lost") is not None]
        self.say(
            type="round",
            round=order["round"],
            partner=partner,
            received=received,
            connected=any(one["connected"] for one in sent),
            refused=any(one.get("refused") for one in sent),
            lost=max(shares, default=None),
        )

    def _send(self, peer: Mapping[str, Any], order: Mapping[str, Any]) -> dict[str, Any]:
        seconds = order["seconds"]
        header = {"kind": "bulk", "round": order["round"], "from": self.index, "seconds": seconds}
        header["token"] = self._token
        try:
            link = wire.connect(peer["address"], peer["port"], header, CONNECT)
        except ConnectionRefusedError:
            return {"connected": False, "refused": True}
        except OSError:
            return {"connected": False}
        lost = wire.send_for(link, seconds + 2.0)
        wire.drop(link)
        return {"connected": True, "lost": lost}

    def _received(self, order: Mapping[str, Any], partner: int, jobs: list[Any]) -> float | None:
        """Return the sum of the streams' rates; None if there are none."""
        key, streams = (order["round"], partner), order["streams"]
        with self._arrived:
            self._arrived.wait_for(
                lambda: len(self._rates.get(key, ())) >= streams, order["seconds"] + CONNECT
            )
        wait(jobs)
        with self._arrived:
            rates = self._rates.pop(key, None)
        return None if rates is None else sum(rates)

    def _collective(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Run this node's ranks of the all-reduce, if a group contains this node."""
        for group in groups:
            for index, rank, count in group["members"]:
                if index == self.index:
                    order = {**group, "members": [], "rank": rank, "count": count}
                    self.say(type="collective", **self._ranks.run(order))

    def close(self) -> None:
        """End the child processes."""
        self._ranks.close()
        self._doorkeeper.close()

    def _with_iperf(self, peer: Mapping[str, Any], order: Mapping[str, Any]) -> dict[str, Any]:
        """Measure with iperf3, one direction after the other; the node with the lower index is the server."""
        if self.index < peer["index"]:
            serve(order["port"], order["seconds"] * 2 + CONNECT)
            return {"partner": peer["index"], "measured": []}
        half = order["seconds"] / 2
        measured = [
            measure(peer["address"], order["port"], half, order["streams"], reverse)
            for reverse in (False, True)
        ]
        return {"partner": peer["index"], "measured": measured}


def targets(own: int, indexes: Sequence[int], first: int) -> list[int]:
    """Return the nodes for node ``own`` to try the ports of: the first node, and the next two in a ring."""
    place = bisect.bisect_left(indexes, own)
    ring = [indexes[(place + step) % len(indexes)] for step in (1, 2)]
    return [one for one in dict.fromkeys([first, *ring]) if one != own and one in indexes]


def own_addresses() -> dict[str, int]:
    """Return the MTU in bytes of each address of this node that others can use, in the kernel's order."""
    import psutil

    found, stats = [], psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            local = entry.address.startswith(("127.", "::1", "fe80"))
            if entry.family in (socket.AF_INET, socket.AF_INET6) and not local:
                found.append((entry.address, stats[name].mtu if name in stats else 0))
    # IPv4 first, because host files mostly contain IPv4 addresses.
    return dict(sorted(found, key=lambda one: ":" in one[0])[:16])


def main() -> None:
    """Carry out orders until the last order, or the end of standard input."""
    environ = os.environ
    name = environ.get("SLURMD_NODENAME") or socket.gethostname()
    agent = NetcheckAgent(
        environ.get("HPCRUN_CHECK_NAME", name), int(environ.get("SLURM_PROCID", "0")), sys.stdout
    )
    agent.hello()
    for line in sys.stdin:
        if not agent.obey(json.loads(line)):
            break
    agent.close()
    # Threads that still wait for a peer must not keep this process alive.
    sys.stdout.flush()
    os._exit(0)


_SLACK = 10.0
# The server of the pair may still be starting.
_TRIES, _PAUSE = 20, 0.25


def installed() -> bool:
    """Return True if iperf3 is on PATH."""
    return shutil.which("iperf3") is not None


def client_command(
    address: str, port: int, seconds: float, streams: int, reverse: bool
) -> list[str]:
    """Build the measurement of one direction; ``reverse``: from the server to the client."""
    command = ["iperf3", "-c", address, "-p", str(port), "-J", "-t", f"{max(1, round(seconds))}"]
    command += ["-P", str(streams), "--connect-timeout", "3000"]
    return [*command, "-R"] if reverse else command


def server_command(port: int) -> list[str]:
    """Build a server for one measurement."""
    return ["iperf3", "-s", "-1", "-p", str(port)]


def parse(text: str) -> dict[str, Any]:
    """Return ``rate`` in bit/s and the fraction of retransmitted segments, or the ``error``.

    iperf3 ends with exit code 0 even if no server listens, so only the text counts.
    """
    try:
        found = json.loads(text)
    except ValueError:
        return {"error": " ".join(text.split())[:200] or "iperf3 printed nothing"}
    if found.get("error"):
        return {"error": str(found["error"])}
    end = found.get("end", {})
    rate = end.get("sum_received", {}).get("bits_per_second")
    if rate is None:
        return {"error": "iperf3 reported no rate"}
    sent = end.get("sum_sent", {})
    # iperf3 counts retransmitted segments, but only the bytes that it sent: an Ethernet segment has 1448
    # bytes.
    segments = (sent.get("bytes") or 0) / 1448
    again = sent.get("retransmits")
    lost = again / segments if again is not None and segments else None
    return {"rate": float(rate), "lost": lost}


def measure(address: str, port: int, seconds: float, streams: int, reverse: bool) -> dict[str, Any]:
    """Measure one direction; try again while the server has not started."""
    command = client_command(address, port, seconds, streams, reverse)
    answer: dict[str, Any] = {"error": "not tried"}
    for _ in range(_TRIES):
        answer = parse(_output(command, seconds + _SLACK))
        if "refused" not in answer.get("error", "") and "busy" not in answer.get("error", ""):
            break
        time.sleep(_PAUSE)
    return answer | {"reverse": reverse}


def serve(port: int, seconds: float) -> None:
    """Serve two measurements, one after the other, for at most ``seconds``."""
    end = time.monotonic() + seconds
    for _ in range(2):
        _output(server_command(port), max(1.0, end - time.monotonic()))


def _output(command: Sequence[str], timeout: float) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return json.dumps({"error": f"iperf3 took longer than {timeout:.0f} s"})
    except OSError as error:
        return json.dumps({"error": f"cannot run iperf3: {error.strerror}"})
    return done.stdout or done.stderr


if __name__ == "__main__":
    main()
