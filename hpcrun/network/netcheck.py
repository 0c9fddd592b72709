"""The coordinator of a network check: asks the nodes to measure their links, and runs an all-reduce."""

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpcrun.network.agents import Nodes
from hpcrun.network.faults.connections import single_gaps
from hpcrun.network.faults.quality import Suspicious, far, loss_pairs, lossy
from hpcrun.network.faults.rates import seems_below_hardware, slow_parts
from hpcrun.network.findings import excluded, findings
from hpcrun.network.links import CONNECT
from hpcrun.network.measurements import (
    SIZES,
    Collective,
    NameCheck,
    NetworkMeasurements,
    NodeNetwork,
    Pair,
    Transfer,
    bus_bandwidth,
    rounds_for,
)
from hpcrun.network.probes import findings_of, probes, record_from
from hpcrun.network.rank_zero_ports import check_ports, tried_ports
from hpcrun.network.rdma import RdmaCheck
from hpcrun.network.torch_child import IMPORT
from hpcrun.ports.node_checks import Needs

_GRACE, _READY = 10.0, 30.0
_PARTNERS, _MOST_AGAIN = 3, 24
# Each gloo rank connects to every other rank.
_CONNECTING = 0.05


@dataclass(frozen=True)
class Options:
    """Options of the measurement. ``seconds``: of each round.

    ``rdma``: of each RDMA measurement; 0: none. ``all_reduce``: seconds after which an all-reduce over all
    nodes counts as hanging; 0: no all-reduce.
    ``patience``: seconds for the nodes to start.
    """

    seconds: float = 3.0
    streams: int = 4
    rdma: int = 0
    all_reduce: float = 0.0
    patience: float = 120.0


Progress = Callable[[int, int, str], None]
"""Shows the number of finished steps, the number of all steps, and the current work."""


class Check:
    """One check over ``nodes``, which have started."""

    def __init__(self, nodes: Nodes, options: Options, progress: Progress) -> None:
        self._nodes, self._options, self._progress = nodes, options, progress
        # A listener answers no other connection.
        self._token = secrets.token_hex(16)
        self._addresses: dict[str, str] = {}
        self._listening: dict[str, dict[str, Any]] = {}
        self._number = 0
        names = [*nodes.live, *nodes.silent]
        self.measured = NetworkMeasurements(names, nodes.silent, options=vars(options))

    def run(self) -> NetworkMeasurements:
        """Measure everything. A node that stops answering is recorded, and skipped from then on."""
        if len(self._nodes.live) > 1:
            self._listening = self._nodes.ask("listen", _READY)
            self._check_names()
            self._read_networks()
            self._run_probes()
            self._progress(0, 1, "ports of rank 0")
            self.measured.ports = check_ports(self._nodes, self._ports())
            rounds = rounds_for(self._nodes.live)
            begun = time.monotonic()
            for number, pairs in enumerate(rounds):
                self._progress(number, len(rounds), "bandwidth")
                self._round(pairs)
            self.measured.seconds = time.monotonic() - begun
            self._again()
            self._names_again()
            self._rdma()
            self._all_reduce()
        self.measured.ended = self._nodes.ended
        self.measured.ending = _last_line(self._nodes.words()) if self._nodes.ended else ""
        return self.measured

    def _check_names(self) -> None:
        """Let every node resolve all others; choose for each the address at which most nodes found it."""
        self._progress(0, 1, "names and latency")
        self._tell_peers()
        self.measured.names = self._ask_names()
        for name in self._nodes.live:
            met = Counter(
                check.address
                for check in self.measured.names
                if check.target == name and check.problem in (None, "refused", "unreachable")
            )
            usual = met.most_common(1)[0][0] if met else None
            own = self._listening[name]["addresses"]
            self._addresses[name] = usual or next(iter(own), name)
        self._tell_peers()

    def _ask_names(self) -> list[NameCheck]:
        seconds = 4 * CONNECT + 2.0 * len(self._nodes.live)
        return [
            NameCheck(name, **one)
            for name, parts in self._nodes.ask("names", seconds).items()
            for part in parts
            for one in part
        ]

    def _names_again(self) -> None:
        """Repeat long round trips: a busy processor delays some tries, a long way delays all."""
        if far(self.measured.names) == Suspicious():
            return
        again = {(one.resolver, one.target): one.least for one in self._ask_names()}

        def shorter(one: NameCheck) -> NameCheck:
            second = again.get((one.resolver, one.target))
            seen = [least for least in (one.least, second) if least is not None]
            return replace(one, least=min(seen, default=None))

        self.measured.names = [shorter(one) for one in self.measured.names]

    def _read_networks(self) -> None:
        found = self._nodes.ask("network", _READY, addresses=self._addresses)
        self.measured.networks = {name: NodeNetwork(**facts) for name, facts in found.items()}

    def _tell_peers(self) -> None:
        peers = [
            {
                "name": name,
                "port": self._listening[name]["port"],
                "addresses": self._listening[name]["addresses"],
                "address": self._addresses.get(name, ""),
            }
            for name in self._nodes.live
        ]
        # A node answers only the nodes that it knows.
        self._nodes.ask("peers", _READY, peers=peers, token=self._token)

    def _run_probes(self) -> None:
        needs = asdict(Needs(hosts=list(self._addresses.values())))
        for one in probes().values():
            if one.netcheck:
                found = self._nodes.ask(one.name, one.seconds, needs=needs)
                self.measured.probed += findings_of(
                    {
                        name: [(one.name, record_from(record)) for record in records]
                        for name, records in found.items()
                    }
                )

    def _ports(self) -> list[int]:
        return tried_ports(os.environ, os.environ.get("SLURM_JOB_ID", self._token))

    def _rdma(self) -> None:
        if self._options.rdma:
            rdma = RdmaCheck(self._nodes, self._addresses, self._options.rdma)
            rdma.run(self._progress)
            self.measured.rdma, self.measured.no_rdma = rdma.transfers, rdma.missing

    def _round(self, pairs: Sequence[Pair], again_for: tuple[str, ...] = ()) -> None:
        """Run one round, all pairs at the same time."""
        live = set(self._nodes.live)
        pairs = [pair for pair in pairs if live.issuperset(pair)]
        busy = {name for pair in pairs for name in pair}
        if not pairs:
            return
        self._number += 1
        options = self._options
        order: dict[str, Any] = {"number": self._number, "pairs": pairs}
        order |= {"seconds": options.seconds, "streams": options.streams}
        seconds = options.seconds + 2 * CONNECT + _GRACE
        answers = self._nodes.ask("round", seconds, busy, **order)
        for pair in pairs:
            for sender, receiver in (pair, pair[::-1]):
                if sender in answers and receiver in answers:
                    sent, rate = answers[sender], answers[receiver]["received"] or 0.0
                    one = Transfer(
                        sender,
                        receiver,
                        rate if sent["connected"] else None,
                        sent["refused"],
                        sent["lost"],
                        again_for,
                    )
                    self.measured.transfers.append(one)

    def _again(self) -> None:
        """Measure bad pairs again, one at a time: a bad cable stays bad without other load."""
        transfers = self.measured.transfers
        low, losing = slow_parts(transfers), lossy(transfers)
        pairs = [*single_gaps(transfers), *low.links, *loss_pairs(losing, transfers)]
        fastest = None if low.nodes or low.links else seems_below_hardware(self.measured)
        pairs += [fastest] if fastest else []
        nodes = dict.fromkeys([*low.nodes, *losing.nodes])
        repeated = _to_repeat([*nodes], list(dict.fromkeys(pairs)), self._nodes.live)
        for step, (subject, pair) in enumerate(repeated):
            self._progress(step, len(repeated), "measuring bad nodes and links again")
            self._round([pair], subject)
        if fastest:
            self._measure_loopback(fastest)

    def _measure_loopback(self, nodes: Sequence[str]) -> None:
        """Let each of ``nodes`` send to itself, one after the other."""
        for name in nodes:
            self._number += 1
            order = {"number": self._number, "seconds": 1.0, "streams": self._options.streams}
            found = self._nodes.ask("loopback", 1.0 + CONNECT + _GRACE, [name], lose=False, **order)
            if found.get(name):
                self.measured.loopback[name] = found[name]

    def _all_reduce(self) -> None:
        """Run an all-reduce over the nodes without a finding; a bad node would only make it slow."""
        found = findings(self.measured)
        # Connections to a node with the address of another node may reach either.
        doubtful = {node for one in found if one.check == "address" for node in one.nodes}
        left_out = {*excluded(found), *doubtful}
        well = [name for name in self._nodes.live if name not in left_out]
        if not self._options.all_reduce or len(well) < 2 or not all(one.nodes for one in found):
            return
        self._progress(0, 1, "all-reduce")
        self.measured.collective = AllReduce(self._nodes, self._addresses, self._options).run(well)


def _to_repeat(
    nodes: Sequence[str], pairs: Sequence[Pair], live: Sequence[str]
) -> list[tuple[tuple[str, ...], Pair]]:
    """Return the pairs to repeat, each with its suspect: bad ``nodes`` with good nodes, and bad ``pairs``."""
    well = [name for name in live if name not in nodes]
    repeated: list[tuple[tuple[str, ...], Pair]] = []
    for position, name in enumerate(nodes):
        for step in range(min(_PARTNERS, len(well))):
            repeated.append(((name,), (name, well[(position + step) % len(well)])))
    repeated += [(pair, pair) for pair in pairs]
    return repeated[:_MOST_AGAIN]


def _last_line(words: str) -> str:
    """Return the last line that a launcher printed, at most 300 characters."""
    return next((line.strip()[:300] for line in reversed(words.splitlines()) if line.strip()), "")


class AllReduce:
    """All-reduces over groups of nodes. ``addresses``: of each node for the other nodes."""

    def __init__(self, nodes: Nodes, addresses: Mapping[str, str], options: Options) -> None:
        self._nodes, self._addresses, self._limit = nodes, addresses, options.all_reduce
        # The measurement has to end long before the limit.
        self._seconds = min(options.seconds, options.all_reduce / 4)
        self._answers: dict[str, dict[str, Any]] = {}
        self._orders: dict[str, dict[str, Any]] = {}

    def run(self, names: Sequence[str]) -> Collective:
        """Run an all-reduce over all of ``names``; if it fails, search the node that makes it fail."""
        if self.works([names])[0]:
            return self._figures(names)
        failed = self._failure(names)
        isolated = isolate(names, self.works)
        if not isolated and self.works([names])[0]:
            # A failure that does not repeat has no faulty node.
            return self._figures(names)
        return Collective(**(vars(failed) | {"isolated": tuple(isolated)}))

    def works(self, groups: Sequence[Sequence[str]]) -> list[bool]:
        """Run one all-reduce in each group, all at the same time; return which groups succeeded."""
        busy = {name for group in groups for name in group}
        ready = self._nodes.ask("prepare", IMPORT + 2 * _GRACE, busy, lose=False)
        self._answers = {name: {"stage": "hangs"} for name in busy} | ready
        whole = [group for group in groups if all(self._stage(name) == "here" for name in group)]
        orders = [self._order(group, ready) for group in whole]
        if orders:
            self._orders |= {order["first"]: order for order in orders}
            members = {name for group in whole for name in group}
            seconds = max(order["limit"] for order in orders) + 2 * _GRACE
            self._answers |= {name: {"stage": "hangs"} for name in members}
            self._answers |= self._nodes.ask("measure", seconds, members, lose=False, groups=orders)
        return [all(self._stage(name) == "done" for name in group) for group in groups]

    def _stage(self, name: str) -> str:
        return str(self._answers[name]["stage"])

    def _order(self, group: Sequence[str], ready: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        gpus = [ready[name]["gpus"] for name in group]
        counts = gpus if all(gpus) else [1] * len(group)
        members, ranks = {}, 0
        for name, count in zip(group, counts, strict=True):
            members[name] = (ranks, count)
            ranks += count
        return {
            "first": group[0],
            "members": members,
            "ranks": ranks,
            "backend": "nccl" if all(gpus) else "gloo",
            "address": self._addresses[group[0]],
            "peers": [self._addresses[name] for name in (group[1], group[0])],
            "port": ready[group[0]]["port"],
            "limit": self._limit + ranks * _CONNECTING,
            "collectives": ["all_reduce"],
            "sizes": SIZES,
            "seconds": self._seconds / len(SIZES),
            "longest": self._seconds / len(SIZES),
        }

    def _figures(self, names: Sequence[str]) -> Collective:
        order, (*_, (_, size, seconds)) = self._orders[names[0]], self._answers[names[0]]["cells"]
        busbw = bus_bandwidth(size, seconds, order["ranks"])
        return Collective(tuple(names), order["backend"], order["ranks"], size, seconds, busbw)

    def _failure(self, names: Sequence[str]) -> Collective:
        bad = [self._answers[name] for name in names if self._stage(name) != "done"]
        # The message of a failed rank explains more than the missing answers of the ranks that wait for it.
        reported = next((one["problem"] for one in bad if one.get("problem")), None)
        joined = sum(one.get("after") == "joined" for one in bad)
        limit = self._limit + len(names) * _CONNECTING
        hangs = f"no result after {limit:.0f} s; {joined} of {len(names)} nodes had joined"
        order = self._orders.get(names[0], {"backend": "gloo", "ranks": len(names)})
        return Collective(tuple(names), order["backend"], order["ranks"], problem=reported or hangs)


Works = Callable[[Sequence[Sequence[str]]], list[bool]]
"""Runs a collective in each group of nodes at the same time, and returns for each group if it worked."""

_ROUNDS_OF_PAIRS = 4


def isolate(nodes: Sequence[str], works: Works) -> list[str]:
    """Return the nodes that make a collective fail, after it has failed over all ``nodes``.

    A few rounds of pairs: a faulty node fails with each of its partners. If every node works with a partner,
    no node is returned: the fault is then between nodes, or no longer there.

    Args:
        nodes: at least two.
        works: called with groups that share no node.
    """
    well: set[str] = set()
    for pairs in rounds_for(nodes)[:_ROUNDS_OF_PAIRS]:
        well.update(
            node for pair, good in zip(pairs, works(pairs), strict=True) if good for node in pair
        )
    return [name for name in nodes if name not in well]
