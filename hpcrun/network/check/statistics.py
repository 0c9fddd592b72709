"""Robust statistics of noisy rates: medians of medians, which a few bad links do not change."""

import statistics
from collections import defaultdict
from collections.abc import Iterable

from hpcrun.network.check.measurements import Transfer


def node_rates(transfers: Iterable[Transfer]) -> dict[str, float]:
    """Return for each node its median rate in bit/s, the lower of sending and receiving.

    A bad fiber is often bad in one direction. A transfer without a connection says nothing about speed,
    and one that was repeated for a suspect nothing about its partner: neither counts here.
    """
    return _lower_medians(in_the_rounds(transfers))


def _lower_medians(transfers: Iterable[Transfer]) -> dict[str, float]:
    sent: dict[str, list[float]] = defaultdict(list)
    received: dict[str, list[float]] = defaultdict(list)
    for transfer in transfers:
        if transfer.rate is not None:
            sent[transfer.sender].append(transfer.rate)
            received[transfer.receiver].append(transfer.rate)
    return {
        node: min(statistics.median(rates[node]) for rates in (sent, received) if node in rates)
        for node in {**sent, **received}
    }


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
    return _lower_medians(again).get(subject[0], 0.0)


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


def resent_share(transfers: Iterable[Transfer], node: str) -> float | None:
    """Return the median fraction of retransmitted segments on the links of ``node``; None if unknown."""
    shares = [
        one.lost
        for one in in_the_rounds(transfers)
        if one.lost is not None and node in (one.sender, one.receiver)
    ]
    return statistics.median(shares) if shares else None
