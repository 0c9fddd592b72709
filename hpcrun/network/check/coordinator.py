"""The process of a check that sends orders to the nodes and collects their answers, through srun's pipes."""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrun.errors import NetworkError
from hpcrun.network.check import wire as ports
from hpcrun.network.check.agent import CONNECT
from hpcrun.network.check.all_reduce import AllReduce
from hpcrun.network.check.findings import THRESHOLD, Suspects, excluded, findings, suspects
from hpcrun.network.check.fleet import Fleet
from hpcrun.network.check.measurements import (
    MeasuredNode,
    NameCheck,
    NetworkMeasurements,
    Pair,
    PortCheck,
    Transfer,
    rounds_for,
)
from hpcrun.ranks import addresses as reachable

_HELLO = 120.0
_GRACE = 10.0
_PARTNERS = 3
_MOST_AGAIN = 24


@dataclass(frozen=True)
class Options:
    """Options of the measurement. ``seconds``: of each round. ``patience``: seconds for the nodes to start.

    ``ports``: those that a run uses between its nodes; an empty tuple: try none. ``all_reduce``: seconds
    after which an all-reduce over all nodes counts as hanging; 0: no all-reduce. ``tool``: sockets, iperf3 on
    ``port``, or auto for iperf3 if every node has it.
    """

    seconds: float = 3.0
    streams: int = 4
    tool: str = "sockets"
    port: int = 5201
    ports: tuple[int, ...] = ()
    all_reduce: float = 0.0
    seed: int = 0
    patience: float = _HELLO
    threshold: float = THRESHOLD


Progress = Callable[[int, int, str], None]
"""Shows the number of finished steps, the number of all steps, and the current work."""


class _FleetEnded(Exception):
    """The agents were ended before the check did."""


class Check:
    """One check over the nodes ``names``, in the order of the fleet's tasks."""

    def __init__(
        self, fleet: Fleet, names: Sequence[str], options: Options, progress: Progress
    ) -> None:
        self._fleet, self._names = fleet, list(names)
        self._options, self._progress = options, progress
        self._tool = options.tool
        # A listener answers no other connection.
        self._token = secrets.token_hex(16)
        self._nodes: dict[int, MeasuredNode] = {}
        self._addresses: dict[str, str] = {}
        self._doors: dict[int, dict[str, Any]] = {}
        self.measured = NetworkMeasurements(list(names))

    def run(self) -> NetworkMeasurements:
        """Measure everything. A node that stops answering is recorded, and skipped from then on."""
        self._meet()
        try:
            self._measure()
        except _FleetEnded:
            # Slurm ends the tasks of all nodes if one node fails: silence is no sign of a bad node here.
            self.measured.ended = True
        return self.measured

    def _measure(self) -> None:
        if len(self._nodes) > 1:
            self._check_names()
            self._check_interfaces()
            self._check_ports()
            rounds = self._rounds()
            begun = time.monotonic()
            for number, pairs in enumerate(rounds):
                self._progress(number, len(rounds), "bandwidth")
                self._round(number, pairs)
            self.measured.seconds = time.monotonic() - begun
            self._again(len(rounds))
            self._all_reduce()

    def _meet(self) -> None:
        """Wait until every node has reported its name, or the time is over.

        Raises:
            NetworkError: iperf3 is requested, and a node lacks it.
        """
        self._progress(0, 1, "starting")
        lacking = []
        end = time.monotonic() + self._options.patience
        while len(self._nodes) < len(self._names) and time.monotonic() < end:
            answer = self._fleet.hear(end - time.monotonic())
            if answer is None:
                break
            if answer.get("type") == "hello":
                fields = (answer[key] for key in ("node", "index", "port", "addresses"))
                node = MeasuredNode(*fields)
                self._nodes[node.index] = node
                self._doors[node.index] = answer["door"]
                lacking += [] if answer["iperf3"] else [node.name]
        if self._tool == "iperf3" and lacking:
            where = ", ".join(sorted(lacking))
            raise NetworkError(
                f"--with iperf3: not on PATH on {where}; install it or use --with sockets"
            )
        if self._tool == "auto":
            self._tool = "sockets" if lacking else "iperf3"
        self.measured.options = {**vars(self._options), "tool": self._tool}
        found = {node.name for node in self._nodes.values()}
        for name in self._names:
            if name not in found:
                self.measured.silent[name] = "its task did not start"

    def _check_names(self) -> None:
        """Let every node resolve all others; choose for each the address at which most nodes found it."""
        self._progress(0, 1, "names and latency")
        self._tell_peers()
        self._fleet.tell({"type": "names"})
        seconds = 4 * CONNECT + 2.0 * len(self._nodes)
        silent = self._wait("names", set(self._nodes), seconds, self._take_names)
        self._lose(silent, "no answer while names were checked")
        for node in self._nodes.values():
            address = self._addresses[node.name] = self._address(node)
            if mtu := node.addresses.get(address):
                self.measured.mtus[node.name] = mtu
        self._tell_peers()

    def _check_interfaces(self) -> None:
        """Let each node try its interfaces, and choose as ``job.interface: auto`` does."""
        self._progress(0, 1, "interfaces")
        doors = {index: self._doors[index] for index in self._nodes}
        self._fleet.tell({"type": "interfaces", "doors": doors})
        counts = [sum(map(len, door["interfaces"].values())) for door in doors.values()]
        # Two waits per try, for the connection and for the answer; the peers are tried in two groups.
        seconds = max(counts, default=0) * 4 * reachable.TRIES * reachable.PATIENCE + _GRACE
        why = "no answer while interfaces were tried"
        found = self._collect("interfaces", "names", seconds, why)
        self.measured.interface = reachable.agreed(list(found.values()), reachable.link_speeds())

    def _check_ports(self) -> None:
        """Let each node listen on the ports of a run, and others connect to them."""
        if not self._options.ports:
            return
        self._progress(0, 1, "ports")
        name = {node.index: node.name for node in self._nodes.values()}
        of = {node.name: node.index for node in self._nodes.values()}

        def take_reached(answer: dict[str, Any]) -> bool:
            if "target" in answer:
                target = answer["target"]
                tried = tuple(held[of[target]])
                failed = {kind: tuple(answer[kind]) for kind in ("refused", "unreachable")}
                check = PortCheck(name[answer["index"]], target, tried, **failed)
                self.measured.ports.append(check)
            return bool(answer.get("done"))

        why = "no answer while ports were tried"
        self._fleet.tell({"type": "hold", "ports": self._options.ports})
        held = self._collect("hold", "ports", _GRACE * 3, why)
        self._fleet.tell({"type": "reach", "held": held, "first": min(held, default=0)})
        # Two waits per try, for the connection and for the answer; three nodes are tried.
        seconds = 3 * 2 * ports.TRIES * ports.PATIENCE + _GRACE
        self._lose(self._wait("reach", set(self._nodes), seconds, take_reached), why)
        self._fleet.tell({"type": "hold", "ports": []})

    def _address(self, node: MeasuredNode) -> str:
        """Return the address at which most nodes reached this node, else its first own address."""
        met = Counter(
            check.address
            for check in self.measured.names
            if check.target == node.name and check.problem in (None, "refused", "unreachable")
        )
        usual = met.most_common(1)[0][0] if met else None
        return usual or next(iter(node.addresses), node.name)

    def _tell_peers(self) -> None:
        peers = [
            {
                "name": node.name,
                "index": node.index,
                "port": node.port,
                "addresses": node.addresses,
                "address": self._addresses.get(node.name, ""),
            }
            for node in self._nodes.values()
        ]
        self._fleet.tell({"type": "peers", "peers": peers, "token": self._token})
        # A node answers only the nodes that it knows.
        silent = self._wait("ready", set(self._nodes), _GRACE * 3, bool)
        self._lose(silent, "no answer after it had started")

    def _take_names(self, answer: dict[str, Any]) -> bool:
        self.measured.names += [_name_check(answer["node"], one) for one in answer["checks"]]
        return bool(answer.get("done"))

    def _wait(
        self,
        kind: str,
        waiting: set[int],
        seconds: float,
        take: Callable[[dict[str, Any]], bool],
    ) -> set[int]:
        """Wait for an answer of a kind that ``take`` accepts from each node; return the nodes without one."""
        end = time.monotonic() + seconds
        while waiting and (left := end - time.monotonic()) > 0:
            answer = self._fleet.hear(left)
            if answer is None:
                break
            if answer.get("type") == kind and answer["index"] in waiting and take(answer):
                waiting.discard(answer["index"])
        return waiting

    def _collect(self, kind: str, field: str, seconds: float, why: str) -> dict[int, Any]:
        """Return a field of each node's answer; nodes without one are lost."""
        found: dict[int, Any] = {}

        def take(answer: dict[str, Any]) -> bool:
            found[answer["index"]] = answer[field]
            return True

        self._lose(self._wait(kind, set(self._nodes), seconds, take), why)
        return {index: found[index] for index in self._nodes}

    def _rounds(self) -> list[list[Pair]]:
        """Return the schedule, in the agents' indexes."""
        indexes = sorted(self._nodes)
        return [
            [(indexes[a], indexes[b]) for a, b in pairs]
            for pairs in rounds_for(len(indexes), self._options.seed)
        ]

    def _round(self, number: int, pairs: Sequence[Pair], again_for: tuple[str, ...] = ()) -> None:
        """Run one round, all pairs at the same time; skip nodes without an answer from then on."""
        pairs = [pair for pair in pairs if all(index in self._nodes for index in pair)]
        if not pairs:
            return
        options = self._options
        order = {"type": "round", "round": number, "pairs": pairs, "seconds": options.seconds}
        self._fleet.tell(
            order | {"streams": options.streams, "with": self._tool, "port": options.port}
        )
        answers: dict[int, dict[str, Any]] = {}

        def take(answer: dict[str, Any]) -> bool:
            if answer["round"] != number:
                return False
            answers[answer["index"]] = answer
            return True

        busy = {index for pair in pairs for index in pair}
        silent = self._wait("round", busy, options.seconds + 2 * CONNECT + _GRACE, take)
        for pair in pairs:
            self.measured.transfers += self._transfers(pair, answers, again_for)
        self._lose(silent, f"no answer in round {number + 1}")

    def _transfers(
        self, pair: Pair, answers: dict[int, dict[str, Any]], again_for: tuple[str, ...]
    ) -> list[Transfer]:
        if self._tool == "iperf3":
            return self._of_iperf(pair, answers, again_for)
        found = []
        for sender, receiver in (pair, pair[::-1]):
            sent, got = answers.get(sender), answers.get(receiver)
            if sent is None or got is None:
                continue
            rate = (got["received"] or 0.0) if sent["connected"] else None
            ends = self._nodes[sender].name, self._nodes[receiver].name
            found.append(Transfer(*ends, rate, sent["refused"], sent["lost"], again_for))
        return found

    def _of_iperf(
        self, pair: Pair, answers: dict[int, dict[str, Any]], again_for: tuple[str, ...]
    ) -> list[Transfer]:
        server, client = sorted(pair)
        found = []
        for one in answers.get(client, {}).get("measured", []):
            ends = (server, client) if one["reverse"] else (client, server)
            sender, receiver = (self._nodes[index].name for index in ends)
            refused = "refused" in one.get("error", "")
            rate, lost = one.get("rate"), one.get("lost")
            found.append(Transfer(sender, receiver, rate, refused, lost, again_for))
        return found

    def _again(self, number: int) -> None:
        """Measure slow pairs again, one at a time: a bad cable stays slow without other load."""
        repeated = self._to_repeat(suspects(self.measured.transfers, self._options.threshold))
        for step, (subject, pair) in enumerate(repeated):
            self._progress(step, len(repeated), "measuring slow nodes and links again")
            self._round(number + step, [pair], subject)

    def _to_repeat(self, found: Suspects) -> list[tuple[tuple[str, ...], Pair]]:
        """Return the pairs to repeat, each with its suspect: slow nodes with sound nodes, and slow links."""
        index = {node.name: node.index for node in self._nodes.values()}
        well = [name for name in index if name not in found.nodes]
        repeated: list[tuple[tuple[str, ...], Pair]] = []
        for position, name in enumerate(found.nodes):
            partners = [
                well[(position + step) % len(well)] for step in range(min(_PARTNERS, len(well)))
            ]
            if name in index:
                repeated += [((name,), (index[name], index[partner])) for partner in partners]
        for pair in found.links:
            if all(name in index for name in pair):
                repeated.append((pair, (index[pair[0]], index[pair[1]])))
        return repeated[:_MOST_AGAIN]

    def _all_reduce(self) -> None:
        """Run an all-reduce over the nodes without a finding; a bad node would only make it slow."""
        found = findings(self.measured, self._options.threshold)
        left_out = excluded(found)
        well = [one.index for one in self._nodes.values() if one.name not in left_out]
        if not self._options.all_reduce or len(well) < 2 or not all(one.nodes for one in found):
            return
        self._progress(0, 1, "all-reduce")
        whole = AllReduce(
            self._fleet,
            self._wait,
            self._nodes,
            self._addresses,
            limit=self._options.all_reduce,
            # The measurement has to end long before the limit.
            seconds=min(self._options.seconds, self._options.all_reduce / 4),
        )
        self.measured.collective = whole.run(sorted(well))

    def _lose(self, indexes: set[int], why: str) -> None:
        if indexes and self._fleet.ended():
            raise _FleetEnded
        for index in sorted(indexes):
            node = self._nodes.pop(index)
            self.measured.silent[node.name] = why


def _name_check(resolver: str, record: dict[str, Any]) -> NameCheck:
    return NameCheck(
        resolver,
        record["target"],
        record.get("address"),
        record.get("seconds"),
        record.get("problem"),
    )
