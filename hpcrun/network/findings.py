"""The findings about nodes and links, and the report of a check. A fault-free allocation has no finding."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrun.network.measurements import (
    MIB,
    Collective,
    NameCheck,
    NetworkMeasurements,
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
from hpcrun.network.probes import Finding
from hpcrun.network.rank_zero_ports import port_findings

# A node or a link below this fraction of the usual rate is slow.
_THRESHOLD = 0.5


@dataclass(frozen=True)
class Suspects:
    """Nodes and links that are slow, to be measured again while no other node sends."""

    nodes: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def findings(measured: NetworkMeasurements) -> list[Finding]:
    """Return the findings, nodes before links; only the most severe finding about a node."""
    found = [_fault("silent", why, node=node) for node, why in measured.silent.items()]
    if measured.ended:
        words = "srun ended before the check, and the rest is missing"
        found.append(_fault("silent", words, "start the job with --no-kill"))
    known = set(measured.silent)
    for faults in (
        _of_names(measured.names, len(measured.nodes)),
        _of_connections(measured.transfers),
        # A wrong MTU explains low rates.
        [one for one in measured.probed if one.status in ("warn", "fail")],
        _of_rates(measured.transfers),
        # Last: on a link that loses packets, an open port may look closed.
        port_findings(measured.ports),
    ):
        named = {one.nodes for one in found}
        fresh = [
            one for one in faults if not known.intersection(one.nodes) and one.nodes not in named
        ]
        found += fresh
        known.update(node for one in fresh if len(one.nodes) == 1 for node in one.nodes)
    if measured.collective is not None:
        found += _of_collective(measured.collective)
    return sorted(found, key=lambda one: len(one.nodes))


def excluded(found: Iterable[Finding]) -> list[str]:
    """Return the nodes to exclude: each bad node, and one node of each bad link."""
    nodes = [one.nodes[0] for one in found if len(one.nodes) == 1]
    links = [one.nodes for one in found if len(one.nodes) == 2]
    while links := [pair for pair in links if not set(pair).intersection(nodes)]:
        # Excluding the node with the most bad links frees the most other nodes.
        nodes.append(Counter(node for pair in links for node in pair).most_common(1)[0][0])
    return sorted(dict.fromkeys(nodes))


def rate_text(rate: float) -> str:
    """Return a rate as ``48 Mbit/s`` or ``9.4 Gbit/s``."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.0f} bit/s"


def _fault(check: str, words: str, remedy: str = "", node: str | None = None) -> Finding:
    return Finding(check, () if node is None else (node,), "fail", words, remedy)


def suspects(transfers: Sequence[Transfer]) -> Suspects:
    """Return the slow nodes and links. Not yet findings: other jobs may be the cause."""
    marks = scores(transfers)
    if len(marks) < 3:
        return Suspects((), ())
    slow = {node for node, score in marks.items() if score < _THRESHOLD}
    usual = usual_rate(node_rates(transfers)) or 0.0
    links = [
        pair
        for pair, rate in link_rates(transfers).items()
        if not slow.intersection(pair)
        and rate < _THRESHOLD * usual * min(1.0, *(marks[node] for node in pair))
    ]
    return Suspects(tuple(sorted(slow)), tuple(sorted(links)))


def _of_names(checks: Sequence[NameCheck], count: int) -> list[Finding]:
    """Return findings about names. If most nodes see a name wrong, the named node is at fault."""
    bad = [check for check in checks if check.problem in ("wrong", "unresolved")]
    by_target, by_resolver = defaultdict(list), defaultdict(list)
    for check in bad:
        by_target[check.target].append(check)
    wrong = {node: seen for node, seen in by_target.items() if len(seen) > max(1, (count - 1) // 2)}
    found = []
    for target, seen in wrong.items():
        words = f"its name {_seen_as(seen[0])} on {len(seen)} nodes"
        found.append(_fault("name", words, "correct the name service", target))
    for check in bad:
        if check.target not in wrong:
            by_resolver[check.resolver].append(check)
    for resolver, seen in by_resolver.items():
        names = ", ".join(sorted(check.target for check in seen))
        words = f"there, the name {names} {_seen_as(seen[0])}"
        found.append(_fault("name", words, "correct its /etc/hosts or resolver", resolver))
    return found


def _seen_as(check: NameCheck) -> str:
    if check.problem == "unresolved":
        return "does not resolve"
    return f"resolves to {check.address}, which is not that node"


def _of_connections(transfers: Sequence[Transfer]) -> list[Finding]:
    """Return findings about nodes to which most connections fail, while other connections succeed."""
    inbound, outbound = defaultdict(list), defaultdict(list)
    for transfer in in_the_rounds(transfers):
        inbound[transfer.receiver].append(transfer)
        outbound[transfer.sender].append(transfer)

    def fails_to_most(node: str) -> bool:
        """Return True if most connections from ``node`` fail, so that ``node`` itself is at fault."""
        return sum(one.rate is None for one in outbound[node]) * 2 > len(outbound[node])

    if len(inbound) > 2 and all(map(fails_to_most, outbound)):
        every = [one for seen in outbound.values() for one in seen]
        refused = sum(one.refused for one in every) * 2 > len(every)
        words = f"most connections between them {'are refused' if refused else 'fail'}"
        remedy = (
            "look for a firewall (iptables, nftables) that closes the ephemeral ports of the nodes"
        )
        return [_fault("refuses" if refused else "unreachable", words, remedy)]
    found = []
    for node, seen in inbound.items():
        failed = [one for one in seen if one.rate is None]
        if len(failed) * 2 <= len(seen):
            continue
        if len(inbound) > 2 and all(fails_to_most(one.sender) for one in failed):
            continue
        if sum(one.refused for one in failed) * 2 > len(failed):
            remedy = "look at its firewall (iptables, nftables)"
            found.append(_fault("refuses", "refuses connections of other nodes", remedy, node))
        else:
            remedy = "look at its cable, its switch port and its firewall"
            found.append(_fault("unreachable", "connections to it fail", remedy, node))
    return found


def _of_rates(transfers: Sequence[Transfer]) -> list[Finding]:
    marks, rates, rounds = scores(transfers), node_rates(transfers), in_the_rounds(transfers)
    usual = usual_rate(rates) or 0.0
    low, parallelism = suspects(transfers), direction_rates(rounds)

    def was_fast_again(subject: tuple[str, ...]) -> bool:
        """Return True if a suspect was fast in the repeated measurement: other load had slowed it."""
        again = rate_again(transfers, subject)
        return again is not None and again >= _THRESHOLD * usual

    found = []
    for node in low.nodes:
        if was_fast_again((node,)):
            continue
        speed = f"{rate_text(rates[node])}, {marks[node]:.0%} of the usual {rate_text(usual)}"
        slow = [way for way, rate in parallelism[node].items() if rate < _THRESHOLD * usual]
        what = f"only {slow[0]} is slow" if len(slow) == 1 else "all its links are slow"
        remedy = "look at its cable, port speed and duplex"
        found.append(_fault("slow", f"{what}: {speed}", remedy, node))
    lowest = link_rates(transfers)
    for pair in low.links:
        if was_fast_again(pair):
            continue
        slow = [
            f"from {one.sender} to {one.receiver}"
            for one in rounds
            if {one.sender, one.receiver} == {*pair} and (one.rate or 0.0) < _THRESHOLD * usual
        ]
        way = f"only {slow[0]}" if len(slow) == 1 else "but not its nodes"
        words = f"the link is slow, {way}: {rate_text(lowest[pair])}, the usual rate is "
        remedy = "check the switches between them"
        found.append(Finding("link", pair, "fail", words + rate_text(usual), remedy))
    return found


def _of_collective(seen: Collective) -> list[Finding]:
    if seen.busbw is not None:
        return []
    remedy = f"look at {seen.backend.upper()}_SOCKET_IFNAME"
    if seen.backend == "nccl":
        remedy += ", at its GPUs and at its RDMA devices; NCCL_DEBUG=INFO says more"
    what = f"an all-reduce ({seen.backend})"
    if seen.isolated and len(seen.isolated) < len(seen.nodes):
        words = f"{what} fails with it and works without it: {seen.problem}"
        return [_fault("collective", words, remedy, node) for node in seen.isolated]
    words = f"{what} over {len(seen.nodes)} nodes fails: {seen.problem}"
    return [_fault("collective", words, remedy)]


def as_data(measured: NetworkMeasurements, found: Sequence[Finding]) -> dict[str, Any]:
    """Return everything as plain data: rates in bit/s, times in seconds."""
    rates, marks = node_rates(measured.transfers), scores(measured.transfers)
    shares = resent_shares(measured.transfers)
    return {
        "nodes": [
            {
                "name": name,
                "bits_per_second": rates.get(name),
                "score": marks.get(name),
                "latency_seconds": latency(measured, name),
                "resent": shares.get(name),
            }
            for name in measured.nodes
        ],
        "usual_bits_per_second": usual_rate(rates),
        "names": [vars(check) for check in measured.names],
        "ports": [vars(check) for check in measured.ports],
        "transfers": [transfer.as_record() for transfer in measured.transfers],
        "rdma": [transfer.as_record() for transfer in measured.rdma],
        "rdma_not_measured": measured.no_rdma,
        "collective": measured.collective.as_record() if measured.collective else None,
        "findings": [finding.as_record() for finding in found],
        "exclude": excluded(found),
        "seconds": measured.seconds,
        "options": dict(measured.options),
    }


def latency(measured: NetworkMeasurements, node: str) -> float | None:
    """Return the median round trip between ``node`` and the others, in seconds."""
    seconds = [
        check.seconds
        for check in measured.names
        if check.seconds is not None and node in (check.resolver, check.target)
    ]
    return statistics.median(seconds) if seconds else None


def node_lines(measured: NetworkMeasurements) -> list[str]:
    """Return one line per node: its usual rate, score, share of segments sent again, and latency."""
    rates, marks = node_rates(measured.transfers), scores(measured.transfers)
    shares = resent_shares(measured.transfers)
    width = max(map(len, measured.nodes))
    lines = [f"{'node':<{width}}  {'rate':>12}  {'score':>5}  {'resent':>6}  round trip"]
    for name in measured.nodes:
        rate = rate_text(rates[name]) if name in rates else "-"
        score = f"{marks[name]:.2f}" if name in marks else "-"
        resent = f"{shares[name]:.1%}" if name in shares else "-"
        seconds = latency(measured, name)
        trip = "-" if seconds is None else f"{seconds * 1e6:.0f} µs"
        lines.append(f"{name:<{width}}  {rate:>12}  {score:>5}  {resent:>6}  {trip}")
    return lines


def collective_line(seen: Collective) -> str:
    """Return the all-reduce in one line, its bandwidth as nccl-tests defines it."""
    what = f"all-reduce over {len(seen.nodes)} nodes ({seen.backend}, {seen.ranks} ranks)"
    if seen.busbw is None or seen.size is None or seen.seconds is None:
        return f"{what}: {seen.problem}"
    size, bandwidth = seen.size // MIB, seen.busbw / 1e9
    return f"{what}: {size} MiB in {seen.seconds * 1e3:.3g} ms, busbw {bandwidth:.3g} GB/s"


def conclusion(found: Sequence[Finding]) -> list[str]:
    """Return one line per finding, and the option that excludes the bad nodes, if any."""
    if not found:
        return ["nothing is wrong"]
    lines = [f"{' - '.join(one.nodes) or 'all nodes'}: {one.text}" for one in found]
    left_out = excluded(found)
    return [*lines, f"--exclude={','.join(left_out)}"] if left_out else lines
