"""Faults of connections: nodes to which most connections fail, and pairs of nodes without a connection."""

from collections import defaultdict
from collections.abc import Sequence

from hpcrun.network.measurements import Pair, Transfer, in_the_rounds
from hpcrun.network.probes import Finding


def connection_findings(transfers: Sequence[Transfer]) -> list[Finding]:
    """Return findings about all nodes, single nodes, or pairs without a connection.

    A pair that connected when it was measured again has no finding.
    """
    everywhere = _everywhere(transfers)
    if everywhere:
        return [everywhere]
    nodes = _nodes(transfers)
    named = {node for one in nodes for node in one.nodes}
    pairs = [_pair(pair, transfers) for pair in gaps(transfers) if not named.intersection(pair)]
    return nodes + [one for one in pairs if one is not None]


def gaps(transfers: Sequence[Transfer]) -> list[Pair]:
    """Return each pair, its names in order, with a direction without a connection in the rounds."""
    found = {
        (min(one.sender, one.receiver), max(one.sender, one.receiver))
        for one in in_the_rounds(transfers)
        if one.rate is None
    }
    return sorted(found)


def single_gaps(transfers: Sequence[Transfer]) -> list[Pair]:
    """Return the gaps that no fault of a node explains, to be tried again."""
    if _everywhere(transfers):
        return []
    named = {node for one in _nodes(transfers) for node in one.nodes}
    return [pair for pair in gaps(transfers) if not named.intersection(pair)]


def _pair(pair: Pair, transfers: Sequence[Transfer]) -> Finding | None:
    again = [one for one in transfers if one.again_for == pair]
    seen = again or [
        one for one in in_the_rounds(transfers) if {one.sender, one.receiver} == {*pair}
    ]
    failed = [one for one in seen if one.rate is None]
    if not failed:
        return None
    what = (
        "connections between them are refused"
        if failed[0].refused
        else "no connection between them"
    )
    ways = {(one.sender, one.receiver) for one in failed}
    way = ", in both directions"
    if len(ways) == 1:
        ((sender, receiver),) = ways
        way = f", only from {sender} to {receiver}"
    remedy = "look at their firewalls (iptables, nftables), routes and the switches between them"
    return Finding("unreachable", pair, "fail", what + way, remedy)


def _most_fail(transfers: Sequence[Transfer]) -> bool:
    return sum(one.rate is None for one in transfers) * 2 > len(transfers)


def _by_node(
    transfers: Sequence[Transfer],
) -> tuple[dict[str, list[Transfer]], dict[str, list[Transfer]]]:
    """Return the transfers of the rounds by receiver, and by sender."""
    inbound, outbound = defaultdict(list), defaultdict(list)
    for transfer in in_the_rounds(transfers):
        inbound[transfer.receiver].append(transfer)
        outbound[transfer.sender].append(transfer)
    return inbound, outbound


def _everywhere(transfers: Sequence[Transfer]) -> Finding | None:
    """Return the finding that most connections of each node fail, or None."""
    inbound, outbound = _by_node(transfers)
    if len(inbound) <= 2 or not all(map(_most_fail, outbound.values())):
        return None
    every = [one for seen in outbound.values() for one in seen]
    refused = sum(one.refused for one in every) * 2 > len(every)
    words = f"most connections between them {'are refused' if refused else 'fail'}"
    remedy = "look for a firewall (iptables, nftables) that closes the ephemeral ports of the nodes"
    return Finding("refuses" if refused else "unreachable", (), "fail", words, remedy)


def _nodes(transfers: Sequence[Transfer]) -> list[Finding]:
    """Return findings about nodes to which most connections fail, while other connections succeed."""
    inbound, outbound = _by_node(transfers)
    if len(inbound) <= 2:
        # A fault of one of two nodes looks like a fault of their link.
        return []
    found = []
    for node, seen in inbound.items():
        failed = [one for one in seen if one.rate is None]
        if len(failed) * 2 <= len(seen):
            continue
        # A sender that reaches no node is at fault itself.
        if all(_most_fail(outbound[one.sender]) for one in failed):
            continue
        if sum(one.refused for one in failed) * 2 > len(failed):
            words, remedy = (
                "refuses connections of other nodes",
                "look at its firewall (iptables, nftables)",
            )
            found.append(Finding("refuses", (node,), "fail", words, remedy))
        else:
            remedy = "look at its cable, its switch port and its firewall"
            found.append(Finding("unreachable", (node,), "fail", "connections to it fail", remedy))
    return found
