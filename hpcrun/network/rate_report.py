"""The report of a network check: JSON and lines."""

import statistics
from collections.abc import Sequence
from typing import Any

from hpcrun.network.findings import excluded, rate_text
from hpcrun.network.measurements import (
    MIB,
    Collective,
    NetworkMeasurements,
    node_rates,
    resent_shares,
    scores,
    usual_rate,
)
from hpcrun.network.probes import Finding


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
        "transfers": [transfer.as_record() for transfer in measured.transfers],
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
    """Return one line per node: its usual rate, its score and its latency."""
    rates, marks = node_rates(measured.transfers), scores(measured.transfers)
    width = max(map(len, measured.nodes))
    lines = [f"{'node':<{width}}  {'rate':>12}  {'score':>5}  round trip"]
    for name in measured.nodes:
        rate = rate_text(rates[name]) if name in rates else "-"
        score = f"{marks[name]:.2f}" if name in marks else "-"
        seconds = latency(measured, name)
        trip = "-" if seconds is None else f"{seconds * 1e6:.0f} µs"
        lines.append(f"{name:<{width}}  {rate:>12}  {score:>5}  {trip}")
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
