"""The table of the links: a line for each measured direction of each pair of nodes."""

from collections.abc import Sequence

from hpcrun.network.measurements import NetworkMeasurements, Transfer, rate_text


def link_lines(measured: NetworkMeasurements) -> list[str]:
    """Return the table: rate, round trip and share of segments sent again, and the RDMA rate if measured."""
    trips = {(one.resolver, one.target): one.seconds for one in measured.names}
    rdma = {(one.sender, one.receiver): one.rate for one in measured.rdma}
    header = ["from", "to", "rate", *(["RDMA"] if rdma else []), "round trip", "resent", ""]
    rows = [header]
    order = {name: position for position, name in enumerate(measured.nodes)}
    ways = sorted(measured.transfers, key=lambda one: (order[one.sender], order[one.receiver]))
    for one in ways:
        way = (one.sender, one.receiver)
        seconds = trips.get(way)
        rows.append(
            [
                *way,
                "-" if one.rate is None else rate_text(one.rate),
                *([rate_text(found) if (found := rdma.get(way)) else "-"] if rdma else []),
                "-" if seconds is None else f"{seconds * 1e6:.0f} µs",
                "-" if one.lost is None else f"{one.lost:.1%}",
                _note(one),
            ]
        )
    return _aligned(rows)


def _note(one: Transfer) -> str:
    if one.again_for:
        return f"again, for {' - '.join(one.again_for)}"
    if one.rate is None:
        return "refused" if one.refused else "no connection"
    return ""


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if position < 2 or position == len(row) - 1 else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
