"""The findings about nodes and links, from the measurements. A fault-free allocation has no finding."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hpcrun.network.check.measurements import (
    Collective,
    NameCheck,
    NetworkMeasurements,
    PortCheck,
    Transfer,
    direction_rates,
    in_the_rounds,
    link_rates,
    node_rates,
    rate_again,
    resent_shares,
    scores,
    usual_rate,
)

Kind = Literal[
    "silent", "name", "refuses", "unreachable", "slow", "lossy", "link", "mtu", "ports", "collective"
]  # fmt: skip

THRESHOLD = 0.5
"""A node or a link below this fraction of the usual rate is slow."""

# A slow port drops packets too, so that only a high share explains a low rate.
_LOSSY = 0.08
# Sound nodes of the dev cluster resend up to 0.1 %; nodes that drop 2 % and 5 % resend as much.
_RESENT, _TIMES_THE_USUAL = 0.01, 5
_LEAST_MTU = 1280
"""The least MTU of a network with IPv6."""
_FIREWALL = "look for a firewall (iptables, nftables) that closes the ephemeral ports of the nodes"


@dataclass(frozen=True)
class NetworkFinding:
    """A finding: one name for a bad node, two for a bad link, none for a fault of all nodes.

    ``text``: the fault and what to check.
    """

    kind: Kind
    nodes: tuple[str, ...]
    text: str

    def as_record(self) -> dict[str, Any]:
        """Return the finding as one flat JSON object."""
        return {"kind": self.kind, "nodes": list(self.nodes), "text": self.text}


@dataclass(frozen=True)
class Suspects:
    """Nodes and links that are slow or lose packets, to be measured again while no other node sends."""

    nodes: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def findings(measured: NetworkMeasurements, threshold: float = THRESHOLD) -> list[NetworkFinding]:
    """Return the findings, nodes before links; only the most severe finding about a node."""
    found = [
        NetworkFinding("silent", (node,), f"does not answer: {why}")
        for node, why in measured.silent.items()
    ]
    if measured.ended:
        text = "srun ended before the check, and the rest is missing; start the job with --no-kill"
        found.append(NetworkFinding("silent", (), text))
    known = set(measured.silent)
    for judged in (
        _of_names(measured.names, len(measured.nodes)),
        _of_connections(measured.transfers),
        # A wrong MTU explains low rates and losses.
        _of_mtus(measured.mtus),
        _of_rates(measured.transfers, threshold),
        _of_losses(measured.transfers),
    ):
        named = {one.nodes for one in found}
        fresh = [
            one for one in judged if not known.intersection(one.nodes) and one.nodes not in named
        ]
        found += fresh
        known.update(node for one in fresh if len(one.nodes) == 1 for node in one.nodes)
    found = _with_ports(found, measured)
    if measured.collective is not None:
        found += _of_collective(measured.collective)
    return sorted(found, key=lambda one: len(one.nodes))


def _with_ports(
    found: Sequence[NetworkFinding], measured: NetworkMeasurements
) -> list[NetworkFinding]:
    """Add the findings about ports. A closed range explains refused connections better than a bad node."""
    closed: tuple[Kind, ...] = ("refuses", "unreachable")
    bad = [frozenset(one.nodes) for one in found if one.kind not in closed]
    faults = port_faults(measured.ports, bad)
    explained = {fault.nodes for fault in faults if fault.partial}
    left = [one for one in found if one.kind not in closed or one.nodes not in explained]
    known = {node for one in left if len(one.nodes) == 1 for node in one.nodes}
    if not all(one.nodes for one in left):
        return left
    fresh = [fault for fault in faults if not known.intersection(fault.nodes)]
    return [*left, *(NetworkFinding("ports", fault.nodes, fault.text) for fault in fresh)]


def suspects(transfers: Sequence[Transfer], threshold: float = THRESHOLD) -> Suspects:
    """Return the slow and the lossy nodes and links. Not yet findings: other jobs may be the cause."""
    slow, lossy = _slow(transfers, threshold), _lossy(transfers)
    nodes = {*slow.nodes, *lossy.nodes}
    links = {pair for pair in (*slow.links, *lossy.links) if not nodes.intersection(pair)}
    return Suspects(tuple(sorted(nodes)), tuple(sorted(links)))


def _slow(transfers: Sequence[Transfer], threshold: float) -> Suspects:
    marks = scores(transfers)
    if len(marks) < 3:
        return Suspects((), ())
    slow = {node for node, score in marks.items() if score < threshold}
    usual = usual_rate(node_rates(transfers)) or 0.0
    links = [
        pair
        for pair, rate in link_rates(transfers).items()
        if not slow.intersection(pair)
        and rate < threshold * usual * min(1.0, *(marks[node] for node in pair))
    ]
    return Suspects(tuple(sorted(slow)), tuple(sorted(links)))


def _lossy(transfers: Sequence[Transfer]) -> Suspects:
    shares = resent_shares(transfers)
    usual = statistics.median(shares.values()) if len(shares) > 2 else 0.0
    limit = max(_RESENT, _TIMES_THE_USUAL * usual)
    nodes = {node for node, share in shares.items() if share > limit and len(shares) > 2}
    links = {
        (min(one.sender, one.receiver), max(one.sender, one.receiver))
        for one in in_the_rounds(transfers)
        if (one.lost or 0.0) > limit and not nodes.intersection((one.sender, one.receiver))
    }
    return Suspects(tuple(sorted(nodes)), tuple(sorted(links)))


def excluded(found: Iterable[NetworkFinding]) -> list[str]:
    """Return the nodes to exclude: each bad node, and one node of each bad link."""
    nodes = [one.nodes[0] for one in found if len(one.nodes) == 1]
    links = [one.nodes for one in found if len(one.nodes) == 2]
    while links := [pair for pair in links if not set(pair).intersection(nodes)]:
        # Excluding the node with the most bad links frees the most other nodes.
        nodes.append(Counter(node for pair in links for node in pair).most_common(1)[0][0])
    return sorted(dict.fromkeys(nodes))


def _of_names(checks: Sequence[NameCheck], count: int) -> list[NetworkFinding]:
    """Return findings about names. If most nodes see a name wrong, the named node is at fault."""
    bad = [check for check in checks if check.problem in ("wrong", "unresolved")]
    by_target = defaultdict(list)
    for check in bad:
        by_target[check.target].append(check)
    found = []
    blamed = set()
    for target, seen in by_target.items():
        if len(seen) > max(1, (count - 1) // 2):
            blamed.add(target)
            text = f"its name {_seen_as(seen[0])} on {len(seen)} nodes; correct the name service"
            found.append(NetworkFinding("name", (target,), text))
    by_resolver = defaultdict(list)
    for check in bad:
        if check.target not in blamed:
            by_resolver[check.resolver].append(check)
    for resolver, seen in by_resolver.items():
        names = ", ".join(sorted(check.target for check in seen))
        text = f"there, the name {names} {_seen_as(seen[0])}; correct its /etc/hosts or resolver"
        found.append(NetworkFinding("name", (resolver,), text))
    return found


def _seen_as(check: NameCheck) -> str:
    if check.problem == "unresolved":
        return "does not resolve"
    return f"resolves to {check.address}, which is not that node"


def _of_connections(transfers: Sequence[Transfer]) -> list[NetworkFinding]:
    """Return findings about nodes to which most connections fail, while other connections succeed."""
    inbound, outbound = defaultdict(list), defaultdict(list)
    for transfer in in_the_rounds(transfers):
        inbound[transfer.receiver].append(transfer)
        outbound[transfer.sender].append(transfer)
    found = []
    if len(inbound) > 2 and all(_fails_to_most(node, outbound) for node in outbound):
        every = [one for seen in outbound.values() for one in seen]
        kind: Kind = "unreachable"
        if sum(one.refused for one in every) * 2 > len(every):
            kind = "refuses"
        words = {"refuses": "are refused", "unreachable": "fail"}[kind]
        return [NetworkFinding(kind, (), f"most connections between them {words}; {_FIREWALL}")]
    for node, seen in inbound.items():
        failed = [one for one in seen if one.rate is None]
        refused = [one for one in failed if one.refused]
        if len(failed) * 2 <= len(seen):
            continue
        peers = {one.sender for one in failed}
        if len(inbound) > 2 and all(_fails_to_most(peer, outbound) for peer in peers):
            continue
        if len(refused) * 2 > len(failed):
            text = "refuses connections of other nodes; look at its firewall (iptables, nftables)"
            found.append(NetworkFinding("refuses", (node,), text))
        else:
            text = "connections to it fail; look at its cable, its switch port and its firewall"
            found.append(NetworkFinding("unreachable", (node,), text))
    return found


def _fails_to_most(node: str, outbound: dict[str, list[Transfer]]) -> bool:
    """Return True if most connections from ``node`` fail, so that ``node`` itself is at fault."""
    seen = outbound[node]
    return sum(one.rate is None for one in seen) * 2 > len(seen)


def _of_rates(transfers: Sequence[Transfer], threshold: float) -> list[NetworkFinding]:
    marks, rates, rounds = scores(transfers), node_rates(transfers), in_the_rounds(transfers)
    usual = usual_rate(rates) or 0.0
    low, ways = _slow(transfers, threshold), direction_rates(rounds)
    shares = resent_shares(transfers)
    found = []
    for node in low.nodes:
        if _was_fast_again(transfers, (node,), threshold * usual):
            continue
        share = shares.get(node, 0.0)
        speed = f"{rate_text(rates[node])}, {marks[node]:.0%} of the usual {rate_text(usual)}"
        if share > _LOSSY:
            text = f"drops packets ({share:.0%} sent again): {speed}; look at its cable and optics"
            found.append(NetworkFinding("lossy", (node,), text))
        else:
            slow = [way for way, rate in ways[node].items() if rate < threshold * usual]
            what = f"only {slow[0]} is slow" if len(slow) == 1 else "all its links are slow"
            text = f"{what}: {speed}; look at its cable, port speed and duplex"
            found.append(NetworkFinding("slow", (node,), text))
    lowest = link_rates(transfers)
    for pair in low.links:
        if _was_fast_again(transfers, pair, threshold * usual):
            continue
        speed = f"{rate_text(lowest[pair])}, the usual rate is {rate_text(usual)}"
        slow = [
            f"from {one.sender} to {one.receiver}"
            for one in rounds
            if {one.sender, one.receiver} == {*pair} and (one.rate or 0.0) < threshold * usual
        ]
        way = f"only {slow[0]}" if len(slow) == 1 else "but not its nodes"
        text = f"the link is slow, {way}: {speed}; check the switches between them"
        found.append(NetworkFinding("link", pair, text))
    return found


def _of_losses(transfers: Sequence[Transfer]) -> list[NetworkFinding]:
    """Return findings about nodes and links that lose packets, in the repeated measurement too."""
    lossy, found = _lossy(transfers), []
    for subject in (*((node,) for node in lossy.nodes), *lossy.links):
        seen = [one for one in transfers if {*subject} <= {one.sender, one.receiver}]
        again = [one for one in seen if one.again_for]
        share = max(one.lost or 0.0 for one in again or seen)
        if share > _RESENT:
            what = "the link loses" if len(subject) > 1 else "drops"
            text = f"{what} packets: up to {share:.1%} are sent again; look at cables and optics"
            found.append(NetworkFinding("lossy", subject, text))
    return found


def _of_mtus(mtus: Mapping[str, int]) -> list[NetworkFinding]:
    """Return findings about an MTU that differs from that of most nodes, or that is small on all nodes."""
    counts = Counter(mtus.values())
    usual = max(counts, key=lambda mtu: (counts[mtu], mtu), default=_LEAST_MTU)
    texts: dict[tuple[str, ...], str] = {
        (node,): f"its MTU is {mtu}, that of the other nodes {usual}; set it to {usual}"
        for node, mtu in mtus.items()
        if mtu != usual
    }
    if usual < _LEAST_MTU:
        texts[()] = f"the MTU is {usual}, below {_LEAST_MTU}; most networks have 1500 or 9000"
    return [NetworkFinding("mtu", nodes, text) for nodes, text in texts.items()]


def _of_collective(seen: Collective) -> list[NetworkFinding]:
    if seen.busbw is not None:
        return []
    backend = seen.backend.upper()
    look = f"look at {backend}_SOCKET_IFNAME" + (
        ", at its GPUs and at its RDMA devices; NCCL_DEBUG=INFO says more"
        if backend == "NCCL"
        else ""
    )
    if seen.isolated and len(seen.isolated) < len(seen.nodes):
        text = f"an all-reduce ({seen.backend}) fails with it and works without it: {seen.problem}; {look}"
        return [NetworkFinding("collective", (node,), text) for node in seen.isolated]
    text = (
        f"an all-reduce ({seen.backend}) over {len(seen.nodes)} nodes fails: {seen.problem}; {look}"
    )
    return [NetworkFinding("collective", (), text)]


def _was_fast_again(transfers: Sequence[Transfer], subject: tuple[str, ...], enough: float) -> bool:
    """Return True if a suspect was fast in the repeated measurement: other load had slowed it."""
    again = rate_again(transfers, subject)
    return again is not None and again >= enough


def rate_text(rate: float) -> str:
    """Return a rate as ``48 Mbit/s`` or ``9.4 Gbit/s``."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.0f} bit/s"


class PortFault(NamedTuple):
    """Nodes at fault, and the fault. No node means all nodes. ``partial``: other ports are open."""

    nodes: tuple[str, ...]
    text: str
    partial: bool


_REMEDY = (
    "open them between the nodes (iptables, nftables), or set MASTER_PORT for rank 0 and "
    "net.ipv4.ip_local_port_range for NCCL and gloo to ports that are open"
)


def ranges(tried: Sequence[int], failed: Collection[int]) -> list[tuple[int, int]]:
    """Return first and last port of each run of ``tried`` ports without an open port between them."""
    found: list[tuple[int, int]] = []
    before = False
    for port in sorted(tried):
        now = port in failed
        if now:
            found.append((found.pop()[0] if before else port, port))
        before = now
    return found


def port_faults(checks: Iterable[PortCheck], bad: Collection[frozenset[str]]) -> list[PortFault]:
    """Return the nodes that close ports.

    If most nodes do not reach the ports of a node, this node is at fault, otherwise the connecting node. If
    every node is at fault, the network is at fault.

    Args:
        checks: the connections of the nodes.
        bad: nodes and links with a finding. Lost packets there look like closed ports.
    """
    counted = [one for one in checks if not any(known <= {one.node, one.target} for known in bad)]
    by_target = defaultdict(list)
    for check in counted:
        by_target[check.target].append(check)
    closed = {
        target: [one for one in seen if one.failed]
        for target, seen in by_target.items()
        if sum(bool(one.failed) for one in seen) * 2 > len(seen)
    }
    if len(closed) > 1 and len(closed) == len(by_target):
        every = [one for seen in closed.values() for one in seen]
        return [PortFault((), f"{_closing(every)}; {_REMEDY}", _partial(every))]
    found = [
        PortFault((target,), f"{_closing(seen)}; {_REMEDY}", _partial(seen))
        for target, seen in closed.items()
    ]
    by_node = defaultdict(list)
    for check in counted:
        if check.failed and check.target not in closed:
            by_node[check.node].append(check)
    for node, seen in by_node.items():
        targets = ", ".join(check.target for check in seen)
        text = f"cannot connect to {_listed(seen)} of {targets}; {_REMEDY}"
        found.append(PortFault((node,), text, _partial(seen)))
    return found


def _partial(seen: Sequence[PortCheck]) -> bool:
    return any(len(check.failed) < len(check.tried) for check in seen)


def _closing(seen: Sequence[PortCheck]) -> str:
    refused = sum(len(check.refused) for check in seen)
    verb = "refuses" if refused * 2 > sum(len(check.failed) for check in seen) else "drops"
    return f"{verb} connections of other nodes to {_listed(seen)}"


def _listed(seen: Sequence[PortCheck]) -> str:
    tried = {port for check in seen for port in check.tried}
    failed = {port for check in seen for port in check.failed}
    parts = [
        f"{first} to {last}" if last > first else str(first)
        for first, last in ranges(sorted(tried), failed)
    ]
    word = "ports" if len(failed) > 1 else "port"
    return f"{word} {', '.join(parts)} ({len(failed)} of {len(tried)} tried)"
