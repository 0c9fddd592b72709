"""The measurements of a network check, their rates, and the order in which the pairs are measured."""

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hpcrun.network.probes import Finding

Pair = tuple[str, str]
MIB = 1 << 20
SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
"""Sizes of the all-reduce in bytes; the largest size that fits the time is measured."""


@dataclass(frozen=True)
class NameCheck:
    """One node's check of another node's name. ``seconds``: median round trip, None with a problem.

    ``least``: the shortest round trip of all tries.
    ``problem``: ``wrong`` means that the address of the name is not an address of the named node, and that
    another node, or none, answers there.
    """

    resolver: str
    target: str
    address: str | None = None
    seconds: float | None = None
    problem: Literal["unresolved", "wrong", "refused", "unreachable"] | None = None
    least: float | None = None


@dataclass(frozen=True)
class NodeNetwork:
    """The network of a node, as the node reports it.

    ``host``: equal for two names of one machine. ``interface``: with the address that the other nodes use.
    ``speed``: of the interface in Mbit/s; None: unknown. ``has_address_of``: other nodes with an address that
    this node has too. ``loopback_name``: its own name resolves only to loopback. ``wrong_variables``:
    statements about variables that name no interface.
    """

    host: str = ""
    interface: str | None = None
    speed: int | None = None
    half_duplex: bool = False
    has_address_of: Sequence[str] = ()
    loopback_name: bool = False
    wrong_variables: Sequence[str] = ()


@dataclass(frozen=True)
class Transfer:
    """Data from one node to another in one round. ``rate`` in bit/s; None without a connection.

    ``refused``: the receiver answered, and refused. ``lost``: fraction of retransmitted segments.
    ``again_for``: the suspected node or link for which this pair was measured again, with no other pair at
    the time.
    """

    sender: str
    receiver: str
    rate: float | None
    refused: bool = False
    lost: float | None = None
    again_for: tuple[str, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Return the transfer as one flat JSON object."""
        found = asdict(self)
        return found | {"bits_per_second": found.pop("rate"), "resent": found.pop("lost")}


@dataclass(frozen=True)
class PortCheck:
    """One node's connections to the ports of ``target`` that ``target`` held.

    ``refused``: the target answered, and refused. ``unreachable``: no answer.
    """

    node: str
    target: str
    tried: tuple[int, ...]
    refused: Sequence[int] = ()
    unreachable: Sequence[int] = ()

    @property
    def failed(self) -> list[int]:
        """The ports that could not be reached."""
        return sorted([*self.refused, *self.unreachable])


@dataclass(frozen=True)
class RdmaTransfer:
    """RDMA writes from one node to another. ``rate`` in bit/s; None with a ``problem``.

    ``device``: device and port of the sender, such as ``mlx5_0:1``.
    """

    sender: str
    receiver: str
    device: str
    rate: float | None
    problem: str | None = None

    def as_record(self) -> dict[str, Any]:
        """Return the transfer as one flat JSON object."""
        found = asdict(self)
        return found | {"bits_per_second": found.pop("rate")}


@dataclass(frozen=True)
class Collective:
    """An all-reduce over ``nodes``. ``busbw``: bytes per second, None if it did not finish.

    ``problem``: the failure. ``isolated``: nodes without which the all-reduce works.
    """

    nodes: tuple[str, ...]
    backend: str
    ranks: int
    size: int | None = None
    seconds: float | None = None
    busbw: float | None = None
    problem: str | None = None
    isolated: tuple[str, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Return the collective as one flat JSON object."""
        found = asdict(self) | {"kind": "all-reduce", "bytes": self.size}
        del found["size"]
        return found | {"busbw_bytes_per_second": found.pop("busbw")}


@dataclass
class NetworkMeasurements:
    """All measurements of a check.

    ``silent``: nodes that did not answer, and why. ``ended``: all tasks ended before the check did, with the
    last line of srun in ``ending``. ``networks``: the facts of each node. ``loopback``: bit/s that a node
    sends to itself, if measured. ``probed``: the findings of the probes. ``no_rdma``: nodes without an RDMA
    measurement, and why.
    """

    nodes: list[str]
    silent: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    ending: str = ""
    networks: dict[str, NodeNetwork] = field(default_factory=dict)
    loopback: dict[str, float] = field(default_factory=dict)
    names: list[NameCheck] = field(default_factory=list)
    probed: list[Finding] = field(default_factory=list)
    ports: list[PortCheck] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    rdma: list[RdmaTransfer] = field(default_factory=list)
    no_rdma: dict[str, str] = field(default_factory=dict)
    collective: Collective | None = None
    seconds: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)


def rate_text(rate: float) -> str:
    """Return a rate as ``48 Mbit/s`` or ``9.4 Gbit/s``."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.0f} bit/s"


def in_the_rounds(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Return the transfers of the rounds in which all nodes were busy."""
    return [one for one in transfers if not one.again_for]


def direction_rates(transfers: Iterable[Transfer]) -> dict[str, dict[str, float]]:
    """Return for each node its median rates in bit/s, of ``sending`` and of ``receiving``.

    A transfer without a connection says nothing about speed.
    """
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in transfers:
        if one.rate is not None:
            rates[one.sender]["sending"].append(one.rate)
            rates[one.receiver]["receiving"].append(one.rate)
    return {
        node: {way: statistics.median(seen) for way, seen in parallelism.items()}
        for node, parallelism in rates.items()
    }


def node_rates(transfers: Iterable[Transfer]) -> dict[str, float]:
    """Return for each node its median rate in bit/s, the lower of sending and receiving.

    A bad fiber is often bad in one direction. A transfer that was repeated for a suspect says nothing about
    its partner, and does not count.
    """
    rates = direction_rates(in_the_rounds(transfers))
    return {node: min(parallelism.values()) for node, parallelism in rates.items()}


def rate_again(transfers: Iterable[Transfer], subject: tuple[str, ...]) -> float | None:
    """Return the rate of the transfers repeated for a suspect; None without any.

    For a node: the lower of the medians of sending and receiving. For a link: the lower direction.
    """
    again = [one for one in transfers if one.again_for == subject]
    if not again:
        return None
    if len(subject) > 1:
        return min(one.rate or 0.0 for one in again)
    return min(direction_rates(again).get(subject[0], {"": 0.0}).values())


def usual_rate(rates: Mapping[str, float]) -> float | None:
    """Return the median of the nodes' medians: the usual rate; one bad node of three does not change it."""
    return statistics.median(rates.values()) if rates else None


def scores(transfers: Iterable[Transfer]) -> dict[str, float]:
    """Return each node's median rate relative to that of all nodes: 1 is usual, 0.1 a tenth of it."""
    rates = node_rates(transfers)
    usual = usual_rate(rates)
    return {node: rate / usual for node, rate in rates.items()} if usual else {}


def link_rates(transfers: Iterable[Transfer]) -> dict[tuple[str, str], float]:
    """Return for each pair, its names in order, the lower rate of its two directions, in bit/s."""
    found: dict[tuple[str, str], float] = {}
    for one in in_the_rounds(transfers):
        if one.rate is not None:
            pair = (min(one.sender, one.receiver), max(one.sender, one.receiver))
            found[pair] = min(one.rate, found.get(pair, one.rate))
    return found


def resent_shares(transfers: Iterable[Transfer]) -> dict[str, float]:
    """Return for each node the usual fraction of retransmitted segments on its links, where known.

    The higher of sending and receiving: a node that drops received packets sends without loss. One bad link
    of two is not usual, hence the lower median.
    """
    sent, received = defaultdict(list), defaultdict(list)
    for one in in_the_rounds(transfers):
        if one.lost is not None:
            sent[one.sender].append(one.lost)
            received[one.receiver].append(one.lost)
    return {
        node: max(
            statistics.median_low(parallelism[node])
            for parallelism in (sent, received)
            if node in parallelism
        )
        for node in {**sent, **received}
    }


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in bytes per second: size / time x 2 (n - 1) / n.

    The factor makes the figure comparable with the speed of the links, whatever the number of ranks.
    """
    return size / max(seconds, 1e-9) * 2 * (ranks - 1) / ranks


_MOST_NODES_FOR_ALL_PAIRS = 64
_MATCHINGS = 10


def all_pairs(nodes: Sequence[str]) -> list[list[Pair]]:
    """Return rounds in which each pair of ``nodes`` meets once, and no node meets two at a time.

    The circle method: the first node stays, the other nodes move by one place per round. An odd number of
    nodes gets an empty place, so that one node rests in each round.
    """
    places: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    half = len(places) // 2
    rounds = []
    for _ in range(len(places) - 1):
        mirrored = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(a, b) for a, b in mirrored if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in rounds if pairs]


def rounds_for(nodes: Sequence[str]) -> list[list[Pair]]:
    """Return every pair for up to 64 nodes, and ten matchings for more, random but always the same."""
    if len(nodes) <= _MOST_NODES_FOR_ALL_PAIRS:
        return all_pairs(nodes)
    dice, rounds = random.Random(0), []
    for _ in range(_MATCHINGS):
        mixed = dice.sample(nodes, len(nodes))
        rounds.append(list(zip(mixed[0::2], mixed[1::2], strict=False)))
    return rounds
