"""Faults that leave the rate high: nodes and links that lose packets, or have a long round trip."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hpcrun.network.measurements import NameCheck, Pair, Transfer, in_the_rounds, resent_shares
from hpcrun.network.probes import Finding

# Fraction of segments sent again: a healthy network loses below one in ten thousand.
_LOSS = 0.004
# If all links lose packets, none differs from the others. Full switches drop some in the rounds.
_LOSS_OF_ALL = 0.01
# A value this many times the usual value differs.
_TIMES = 5.0
# Seconds. A long round trip on an idle link: another building, or a device that delays packets.
_FURTHER, _FAR = 1e-3, 1e-2
_FEW = 3
Key = TypeVar("Key")


@dataclass(frozen=True)
class Suspicious:
    """Nodes and links that differ from the others. ``all_links``: none differs, and most are bad."""

    nodes: tuple[str, ...] = ()
    links: tuple[Pair, ...] = ()
    all_links: bool = False


def lossy(transfers: Sequence[Transfer]) -> Suspicious:
    """Return the nodes and links that lose packets in the rounds."""
    # Loopback drops packets when the receiving process is slow.
    rounds = [one for one in in_the_rounds(transfers) if not one.sender.startswith("127.")]
    links = link_losses(rounds)
    of_node = _best(links)
    nodes = _standing_out(of_node, _LOSS, 0.0) if len(of_node) > 2 else []
    apart = {pair: share for pair, share in links.items() if not {*pair}.intersection(nodes)}
    pairs = _standing_out(apart, _LOSS, 0.0)
    everywhere = not nodes and not pairs and _lower_median(links.values()) >= _LOSS_OF_ALL
    return Suspicious(tuple(sorted(nodes)), tuple(sorted(pairs)), everywhere)


def loss_pairs(found: Suspicious, transfers: Sequence[Transfer]) -> list[Pair]:
    """Return the pairs to measure again for ``found``, without those of its nodes."""
    return [*found.links, *([*link_losses(transfers)][:_FEW] if found.all_links else [])]


def link_losses(transfers: Iterable[Transfer]) -> dict[Pair, float]:
    """Return for each pair of the rounds the higher share of its two directions."""
    found: dict[Pair, float] = {}
    for one in in_the_rounds(transfers):
        if one.lost is not None and one.rate is not None:
            pair = (min(one.sender, one.receiver), max(one.sender, one.receiver))
            found[pair] = max(one.lost, found.get(pair, 0.0))
    return found


def loss_findings(transfers: Sequence[Transfer]) -> list[Finding]:
    """Return a finding for each lossy node and link that lost packets again when no other pair sent."""
    found, shares, links = lossy(transfers), resent_shares(transfers), link_losses(transfers)
    remedy = "look at its cable, its optics and its switch port (ethtool -S)"
    findings = [
        Finding(
            "loss",
            (node,),
            "fail",
            f"its links lose packets: {shares[node]:.1%} sent again",
            remedy,
        )
        for node in found.nodes
        if _lost_again(transfers, (node,))
    ]
    remedy = "look at the switches and cables between them"
    findings += [
        Finding(
            "loss", pair, "fail", f"the link loses packets: {links[pair]:.1%} sent again", remedy
        )
        for pair in found.links
        if _lost_again(transfers, pair)
    ]
    if found.all_links and all(
        _lost_again(transfers, pair) for pair in loss_pairs(found, transfers)
    ):
        usual = _lower_median(links.values())
        words, remedy = f"all links lose packets: {usual:.1%} sent again", "look at the switch"
        findings.append(Finding("loss", (), "fail", words, remedy))
    return findings


def _lost_again(transfers: Sequence[Transfer], subject: tuple[str, ...]) -> bool:
    """Return True if a suspect lost packets in the repeated measurement, or was not repeated."""
    again = [one.lost for one in transfers if one.again_for == subject and one.lost is not None]
    return not again or max(again) >= _LOSS


def far(names: Iterable[NameCheck]) -> Suspicious:
    """Return the nodes and links with a long round trip, by the least of all tries of both directions.

    A busy processor makes most tries long, and seldom all.
    """
    trips = least_trips(names)
    of_node = _best(trips)
    nodes = _standing_out(of_node, _FURTHER, _FURTHER) if len(of_node) > 2 else []
    apart = {pair: seconds for pair, seconds in trips.items() if not {*pair}.intersection(nodes)}
    pairs = _standing_out(apart, _FURTHER, _FURTHER) if len(trips) > 2 else []
    everywhere = not nodes and not pairs and _lower_median(trips.values()) >= _FAR
    return Suspicious(tuple(sorted(nodes)), tuple(sorted(pairs)), everywhere)


def least_trips(names: Iterable[NameCheck]) -> dict[Pair, float]:
    """Return the least round trip of each pair in seconds."""
    found: dict[Pair, float] = {}
    for one in names:
        if one.least is not None:
            pair = (min(one.resolver, one.target), max(one.resolver, one.target))
            found[pair] = min(one.least, found.get(pair, one.least))
    return found


def latency_findings(names: Sequence[NameCheck]) -> list[Finding]:
    """Return a finding for each node or link with a long round trip."""
    found, trips = far(names), least_trips(names)
    usual = _lower_median(
        seconds for pair, seconds in trips.items() if not {*pair}.intersection(found.nodes)
    )
    remedy = "look at its route, its switch and its power-saving modes"
    findings = []
    for node in found.nodes:
        own = _lower_median(seconds for pair, seconds in trips.items() if node in pair)
        words = f"its round trips are long: {_time(own)}, the usual is {_time(usual)}"
        findings.append(Finding("latency", (node,), "fail", words, remedy))
    remedy = "look at the route and the switches between them"
    for pair in found.links:
        words = f"their round trip is long: {_time(trips[pair])}, the usual is {_time(usual)}"
        findings.append(Finding("latency", pair, "fail", words, remedy))
    if found.all_links:
        words = f"all round trips are long: {_time(_lower_median(trips.values()))}"
        remedy = "look at the route between the nodes: they may be in different places"
        findings.append(Finding("latency", (), "fail", words, remedy))
    return findings


def _best(links: Mapping[Pair, float]) -> dict[str, float]:
    """Return for each node the lowest value of its links: a bad node has no good link."""
    found: dict[str, float] = {}
    for pair, value in links.items():
        for node in pair:
            found[node] = min(value, found.get(node, value))
    return found


def _standing_out(values: Mapping[Key, float], least: float, more: float) -> list[Key]:
    """Return the names with a value of at least ``least``, and far above the usual value of the others."""
    found = []
    for name, value in values.items():
        usual = _lower_median(other for one, other in values.items() if one != name)
        if value >= least and value >= max(_TIMES * usual, usual + more):
            found.append(name)
    return found


def _lower_median(values: Iterable[float]) -> float:
    listed = list(values)
    return statistics.median_low(listed) if listed else 0.0


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
