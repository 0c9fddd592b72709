"""Faults of rates: slow nodes and links, groups of nodes, lost large packets, all links below the hardware.

A rate is compared with other rates of the same check, so that a busy machine has no finding. A slow node or
link is measured again while no other pair sends.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpcrun.network.measurements import (
    NetworkMeasurements,
    Pair,
    Transfer,
    direction_rates,
    in_the_rounds,
    link_rates,
    node_rates,
    rate_again,
    rate_text,
    resent_shares,
    scores,
    usual_rate,
)
from hpcrun.network.probes import Finding

# A node or a link below this fraction of the usual rate is slow.
_THRESHOLD = 0.5
# Below this rate, in bit/s, only the first small packets of a connection arrived.
_NOTHING = 1e4
# All links below this fraction of the speed that interfaces and processors allow are slow. On a loaded
# machine with two cores, a node sent itself 3.7 Gbit/s, and two hosts (namespaces) exchanged 1.6 Gbit/s.
_OF_HARDWARE = 0.1
# Share of segments sent again that is worth a word next to a low rate.
_LOSSY = 0.005


@dataclass(frozen=True)
class SlowParts:
    """Slow nodes and links. Not yet findings: other jobs may be the cause.

    ``usual``: the rate in bit/s to which they are compared. ``groups``: half of the nodes or more are slow.
    """

    nodes: tuple[str, ...] = ()
    links: tuple[Pair, ...] = ()
    usual: float = 0.0
    groups: bool = False


def slow_parts(transfers: Sequence[Transfer]) -> SlowParts:
    """Return the slow nodes and links of the rounds."""
    marks = scores(transfers)
    usual = usual_rate(node_rates(transfers)) or 0.0
    if len(marks) < 3:
        return SlowParts(usual=usual)
    slow = {node for node, score in marks.items() if score < _THRESHOLD}
    links = [
        pair
        for pair, rate in link_rates(transfers).items()
        if not slow.intersection(pair)
        and rate < _THRESHOLD * usual * min(1.0, *(marks[node] for node in pair))
    ]
    found = SlowParts(tuple(sorted(slow)), tuple(sorted(links)), usual)
    return found if slow else _groups(transfers) or found


def _groups(transfers: Sequence[Transfer]) -> SlowParts | None:
    """Return the slow nodes if the rates form two groups; None if they do not.

    With half of the nodes slow, the usual rate of each node is slow. The fastest link of a node shows the
    difference: two fast nodes meet in one of the rounds, and a slow node has no fast link.
    """
    rates = link_rates(transfers)
    best: dict[str, float] = {}
    for pair, rate in rates.items():
        for node in pair:
            best[node] = max(rate, best.get(node, 0.0))
    top = max(best.values(), default=0.0)
    fast = {node for node, rate in best.items() if rate >= _THRESHOLD * top}
    slow = sorted(set(best) - fast)
    between = [rate for pair, rate in rates.items() if fast.issuperset(pair)]
    if not slow or not between:
        return None
    usual = statistics.median(between)
    if max(best[node] for node in slow) >= _THRESHOLD * usual:
        return None
    return SlowParts(tuple(slow), (), usual, groups=True)


def rate_findings(measured: NetworkMeasurements) -> list[Finding]:
    """Return the findings about slow nodes and links; about all links only without any other."""
    transfers, low = measured.transfers, slow_parts(measured.transfers)
    links = link_rates(transfers)
    if links and max(links.values()) < _NOTHING:
        place = next(iter(links)) if len(links) == 1 else ()
        return [Finding("mtu", place, "fail", _hole("connections open"), _HOLE)]

    def was_fast_again(subject: tuple[str, ...]) -> bool:
        """Return True if a suspect was fast in the repeated measurement: other load had slowed it."""
        again = rate_again(transfers, subject)
        return again is not None and again >= _THRESHOLD * low.usual

    found = [_slow_node(node, measured, low) for node in low.nodes if not was_fast_again((node,))]
    found += [
        _slow_link(pair, transfers, low.usual) for pair in low.links if not was_fast_again(pair)
    ]
    return found or _below_hardware(measured)


def _slow_node(node: str, measured: NetworkMeasurements, low: SlowParts) -> Finding:
    transfers = measured.transfers
    rounds = in_the_rounds(transfers)
    ways = direction_rates(rounds)[node]
    rate = min(ways.values())
    again = rate_again(transfers, (node,))
    slow = [way for way, seen in ways.items() if seen < _THRESHOLD * low.usual]
    what = f"only {slow[0]} is slow" if len(slow) == 1 else "all its links are slow"
    if rate < _NOTHING and (again is None or again < _NOTHING):
        way = f" ({slow[0]} only)" if len(slow) == 1 else ""
        return Finding("mtu", (node,), "fail", _hole(f"connections to it open{way}"), _HOLE)
    words = f"{what}: {rate_text(rate)}, {rate / low.usual:.0%} of the usual {rate_text(low.usual)}"
    if low.groups:
        words = f"{what}; the rates form two groups: {rate_text(rate)} here, {rate_text(low.usual)} elsewhere"
    share = resent_shares(transfers).get(node)
    if share is not None and share >= _LOSSY:
        words += f"; {share:.1%} of the segments are sent again"
    network = measured.networks.get(node)
    speeds = [one.speed for one in measured.networks.values() if one.speed]
    if network and network.speed and network.speed * 2 <= statistics.median(speeds):
        words += f"; its {network.interface} has {rate_text(network.speed * 1e6)}"
    return Finding("slow", (node,), "fail", words, "look at its cable, port speed and duplex")


def _slow_link(pair: Pair, transfers: Sequence[Transfer], usual: float) -> Finding:
    seen = [one for one in in_the_rounds(transfers) if {one.sender, one.receiver} == {*pair}]
    slow = [
        f"from {one.sender} to {one.receiver}"
        for one in seen
        if (one.rate or 0.0) < _THRESHOLD * usual
    ]
    rate = link_rates(transfers)[pair]
    again = rate_again(transfers, pair)
    if rate < _NOTHING and (again is None or again < _NOTHING):
        way = f" ({slow[0]})" if len(slow) == 1 else ""
        return Finding("mtu", pair, "fail", _hole(f"connections open{way}"), _HOLE)
    way = f"only {slow[0]}" if len(slow) == 1 else "but not its nodes"
    words = f"the link is slow, {way}: {rate_text(rate)}, the usual rate is {rate_text(usual)}"
    shares = [one.lost for one in seen if one.lost is not None]
    if shares and max(shares) >= _LOSSY:
        words += f"; {max(shares):.1%} of the segments are sent again"
    return Finding("link", pair, "fail", words, "check the switches between them")


_HOLE = (
    "the path takes smaller packets than the nodes send: set one MTU on all nodes and switch ports"
)


def _hole(what: str) -> str:
    return f"{what}, but large packets do not arrive"


def fastest_link(transfers: Sequence[Transfer]) -> Pair | None:
    """Return the pair with the highest rate in the rounds, or None."""
    rates = link_rates(transfers)
    return max(rates, key=lambda pair: rates[pair], default=None)


def seems_below_hardware(measured: NetworkMeasurements) -> Pair | None:
    """Return the fastest pair if it is slow for its interfaces: the nodes or the network are the limit."""
    pair = fastest_link(measured.transfers)
    speed = _speed(pair, measured) if pair else None
    if pair is None or speed is None:
        return None
    return pair if link_rates(measured.transfers)[pair] < 2 * _OF_HARDWARE * speed else None


def _speed(pair: Pair, measured: NetworkMeasurements) -> float | None:
    """Return the lower speed of the interfaces of a pair in bit/s; None if one is unknown."""
    speeds = [one.speed for node in pair if (one := measured.networks.get(node)) and one.speed]
    return min(speeds) * 1e6 if len(speeds) == len(pair) else None


def _below_hardware(measured: NetworkMeasurements) -> list[Finding]:
    """Return a finding if the fastest pair, measured by itself, is slow for its interfaces and processors."""
    pair = fastest_link(measured.transfers)
    if pair is None or not {*pair}.issubset(measured.loopback):
        return []
    speed, rate = _speed(pair, measured), rate_again(measured.transfers, pair)
    own = min(measured.loopback[node] for node in pair)
    rate = max(rate or 0.0, link_rates(measured.transfers)[pair])
    if speed is None or rate >= _OF_HARDWARE * min(speed, own):
        return []
    words = (
        f"all links are slow: at most {rate_text(rate)}, the interfaces have {rate_text(speed)}, and a node "
        f"sends itself {rate_text(own)}"
    )
    remedy = "look at the switch, its port speeds and limits, and at the cables"
    return [Finding("slow", (), "fail", words, remedy)]
