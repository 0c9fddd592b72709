"""The findings about nodes and links, and the report of a check. A fault-free allocation has no finding."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from hpcrun.network.faults.addresses import address_findings, name_findings, own_findings
from hpcrun.network.faults.connections import connection_findings, gaps
from hpcrun.network.faults.quality import latency_findings, loss_findings
from hpcrun.network.faults.rates import rate_findings
from hpcrun.network.measurements import (
    MIB,
    Collective,
    NetworkMeasurements,
    node_rates,
    rate_text,
    resent_shares,
    scores,
    usual_rate,
)
from hpcrun.network.probes import Finding
from hpcrun.network.rank_zero_ports import port_findings


def findings(measured: NetworkMeasurements) -> list[Finding]:
    """Return the findings, nodes before links; only the most severe finding about a node."""
    found = [_fault("silent", why, node=node) for node, why in measured.silent.items()]
    if measured.ended:
        found.append(_of_the_end(measured.ending))
    known = set(measured.silent)
    apart = {frozenset(pair) for pair in gaps(measured.transfers)}
    for faults in (
        address_findings(measured.networks),
        name_findings(measured.names, len(measured.nodes)),
        own_findings(measured.networks),
        connection_findings(measured.transfers),
        # A wrong MTU or a long way explains low rates.
        [one for one in measured.probed if one.status in ("warn", "fail")],
        latency_findings(measured.names),
        rate_findings(measured),
        loss_findings(measured.transfers),
        # Last: on a link that loses packets, an open port may look closed.
        port_findings([one for one in measured.ports if {one.node, one.target} not in apart]),
    ):
        named = {one.nodes for one in found}
        fresh = [
            one for one in faults if not known.intersection(one.nodes) and one.nodes not in named
        ]
        found += fresh
        # Nothing else is sure about the two nodes with one address.
        sure = [one for one in fresh if len(one.nodes) == 1 or one.check == "address"]
        known.update(node for one in sure for node in one.nodes)
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


def _of_the_end(ending: str) -> Finding:
    """Return the finding that srun ended before the check. ``ending``: its last line."""
    words = "srun ended before the check, and the rest is missing"
    if "CANCELLED" in ending or "NODE FAIL" in ending.upper():
        remedy = "a job with --no-kill continues after the failure of a node"
        return _fault("silent", f"{words}: {ending}", remedy)
    return _fault("silent", f"{words}: {ending}" if ending else words)


def _fault(check: str, words: str, remedy: str = "", node: str | None = None) -> Finding:
    return Finding(check, () if node is None else (node,), "fail", words, remedy)


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
        "networks": {node: vars(one) for node, one in measured.networks.items()},
        "loopback_bits_per_second": measured.loopback,
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
