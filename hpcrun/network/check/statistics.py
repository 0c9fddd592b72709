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
