"""The measurements of a check, as plain data."""

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NameProblem = Literal["unresolved", "wrong", "refused", "unreachable"]


@dataclass(frozen=True)
class MeasuredNode:
    """A node that answered: its name in Slurm, its place, its listener, and its addresses with their MTUs."""

    name: str
    index: int
    port: int
    addresses: Mapping[str, int]


@dataclass(frozen=True)
class NameCheck:
    """One node's check of another node's name. ``seconds``: median round trip, None with a problem.

    ``problem``: ``wrong`` means that the address of the name is not an address of the named node, and that
    another node, or none, answers there.
    """

    resolver: str
    target: str
    address: str | None
    seconds: float | None = None
    problem: NameProblem | None = None


@dataclass(frozen=True)
class PortCheck:
    """One node's connections to the ports on which another node, ``target``, listened for the check.

    ``tried``: all of these ports, in order. ``refused``, ``unreachable``: those that failed.
    """

    node: str
    target: str
    tried: tuple[int, ...]
    refused: tuple[int, ...] = ()
    unreachable: tuple[int, ...] = ()

    @property
    def failed(self) -> tuple[int, ...]:
        """Return all ports that failed, in order."""
        return tuple(sorted(self.refused + self.unreachable))

    def as_record(self) -> dict[str, Any]:
        """Return the check as one flat JSON object, without the ports that are open."""
        return {
            "node": self.node,
            "target": self.target,
            "tried": len(self.tried),
            "refused": list(self.refused),
            "unreachable": list(self.unreachable),
        }


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
        return {
            "sender": self.sender,
            "receiver": self.receiver,
            "bits_per_second": self.rate,
            "refused": self.refused,
            "resent": self.lost,
            "again_for": list(self.again_for),
        }


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
        return {
            "kind": "all-reduce",
            "nodes": list(self.nodes),
            "backend": self.backend,
            "ranks": self.ranks,
            "bytes": self.size,
            "seconds": self.seconds,
            "busbw_bytes_per_second": self.busbw,
            "problem": self.problem,
            "isolated": list(self.isolated),
        }


@dataclass
class NetworkMeasurements:
    """All measurements of a check.

    ``silent``: nodes that did not answer, and when they stopped. ``interface``: the interface on which all
    other nodes connect. ``mtus``: of the interface at which the other nodes reach a node, in bytes.
    ``ended``: all tasks ended before the check did.
    """

    nodes: list[str]
    silent: dict[str, str] = field(default_factory=dict)
    ended: bool = False
    names: list[NameCheck] = field(default_factory=list)
    interface: str | None = None
    mtus: dict[str, int] = field(default_factory=dict)
    ports: list[PortCheck] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    collective: Collective | None = None
    seconds: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)


def node_rates(transfers: Iterable[Transfer]) -> dict[str, float]:
    """Return for each node its median rate in bit/s, the lower of sending and receiving.

    A bad fiber is often bad in one direction. A transfer without a connection says nothing about speed,
    and one that was repeated for a suspect nothing about its partner: neither counts here.
    """
    return _lower(direction_rates(in_the_rounds(transfers)))


def direction_rates(transfers: Iterable[Transfer]) -> dict[str, dict[str, float]]:
    """Return for each node its median rates in bit/s, of ``sending`` and of ``receiving``."""
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for transfer in transfers:
        if transfer.rate is not None:
            rates[transfer.sender]["sending"].append(transfer.rate)
            rates[transfer.receiver]["receiving"].append(transfer.rate)
    return {
        node: {way: statistics.median(seen) for way, seen in ways.items()}
        for node, ways in rates.items()
    }


def _lower(rates: dict[str, dict[str, float]]) -> dict[str, float]:
    return {node: min(ways.values()) for node, ways in rates.items()}


def in_the_rounds(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Return the transfers of the rounds in which all nodes were busy."""
    return [one for one in transfers if not one.again_for]


def rate_again(transfers: Iterable[Transfer], subject: tuple[str, ...]) -> float | None:
    """Return the rate of the transfers repeated for a suspect; None without any.

    For a node: the lower of the medians of sending and receiving. For a link: the lower direction.
    """
    again = [one for one in transfers if one.again_for == subject]
    if not again:
        return None
    if len(subject) > 1:
        return min(one.rate or 0.0 for one in again)
    return _lower(direction_rates(again)).get(subject[0], 0.0)


def usual_rate(rates: dict[str, float]) -> float | None:
    """Return the median of the nodes' medians: the usual rate; one bad node of three does not change it."""
    return statistics.median(rates.values()) if rates else None


def scores(transfers: Iterable[Transfer]) -> dict[str, float]:
    """Return each node's median rate relative to the fleet's: 1 is usual, 0.1 a tenth of it."""
    rates = node_rates(transfers)
    usual = usual_rate(rates)
    if not usual:
        return {}
    return {node: rate / usual for node, rate in rates.items()}


def link_rates(transfers: Iterable[Transfer]) -> dict[tuple[str, str], float]:
    """Return for each pair, its names in order, the lower rate of its two directions, in bit/s."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for transfer in in_the_rounds(transfers):
        if transfer.rate is not None:
            first, second = sorted((transfer.sender, transfer.receiver))
            found[first, second].append(transfer.rate)
    return {pair: min(rates) for pair, rates in found.items()}


def resent_shares(transfers: Iterable[Transfer]) -> dict[str, float]:
    """Return for each node the usual fraction of retransmitted segments on its links, where known.

    The higher of sending and receiving: a node that drops received packets sends without loss. One bad link
    of two is not usual, hence the lower median.
    """
    shares: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in in_the_rounds(transfers):
        if one.lost is not None:
            shares[one.sender]["sending"].append(one.lost)
            shares[one.receiver]["receiving"].append(one.lost)
    return {
        node: max(statistics.median_low(seen) for seen in ways.values())
        for node, ways in shares.items()
    }


Pair = tuple[int, int]

MOST_NODES_FOR_ALL_PAIRS = 64
_MATCHINGS = 10


def all_pairs(count: int) -> list[list[Pair]]:
    """Return rounds in which each pair of ``count`` nodes meets once, and no node meets two at a time.

    The circle method: node 0 stays, the other nodes move by one place per round. An odd number of nodes gets
    an empty place, so that one node rests in each round. There are ``count - 1`` rounds for an even number of
    nodes, and ``count`` for an odd number.
    """
    places: list[int | None] = list(range(count))
    if count % 2:
        places.append(None)
    half = len(places) // 2
    rounds = []
    for _ in range(len(places) - 1):
        mirrored = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(a, b) for a, b in mirrored if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in rounds if pairs]


def random_matchings(count: int, seed: int) -> list[list[Pair]]:
    """Return ten rounds of random pairs that share no node; the same for the same seed."""
    dice = random.Random(seed)
    rounds = []
    for _ in range(_MATCHINGS):
        nodes = list(range(count))
        dice.shuffle(nodes)
        rounds.append(list(zip(nodes[0::2], nodes[1::2], strict=False)))
    return rounds


def rounds_for(count: int, seed: int = 0) -> list[list[Pair]]:
    """Return every pair for up to 64 nodes, and ten random matchings for more."""
    if count > MOST_NODES_FOR_ALL_PAIRS:
        return random_matchings(count, seed)
    return all_pairs(count)
