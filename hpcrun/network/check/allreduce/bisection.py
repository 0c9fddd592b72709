"""Bisection: the search for the node without which a collective works."""

from collections.abc import Callable, Sequence

from hpcrun.network.check.schedule import all_pairs

Works = Callable[[Sequence[Sequence[int]]], list[bool]]
"""Runs a collective in each group of nodes at the same time, and returns for each group if it worked."""

_ROUNDS_OF_PAIRS = 3


def isolate(nodes: Sequence[int], works: Works) -> list[int]:
    """Return the nodes that make a collective fail, after it has failed over all ``nodes``.

    Each step halves the groups that fail, and runs the halves together: 1000 nodes take ten steps. A group of
    one node gets a working node as its partner. If both halves of a group work, no node is returned: the
    fault is then between nodes, or no longer there.

    Args:
        nodes: at least two.
        works: called with groups that share no node.
    """
    good: list[int] = []
    single: list[int] = []
    failing = [list(nodes)]
    while failing:
        halves = [half for group in failing for half in _halved(group)]
        single += [half[0] for half in halves if len(half) == 1]
        several = [half for half in halves if len(half) > 1]
        failing = []
        for group, well in zip(several, works(several) if several else [], strict=True):
            if well:
                good += group
            else:
                failing.append(group)
    return sorted(_failing(single, good, works)) if single else []


def _failing(single: Sequence[int], good: Sequence[int], works: Works) -> list[int]:
    """Return those of the nodes ``single`` that do not work together with a good node."""
    partners = list(good) or _first_good(single, works)
    if not partners:
        return list(single)
    left = [node for node in single if node not in partners]
    bad: list[int] = []
    for start in range(0, len(left), len(partners)):
        groups = [
            [node, partner]
            for node, partner in zip(left[start : start + len(partners)], partners, strict=False)
        ]
        bad += [group[0] for group, well in zip(groups, works(groups), strict=True) if not well]
    return bad


def _first_good(single: Sequence[int], works: Works) -> list[int]:
    """Return nodes that work in pairs, from a few rounds of pairs; empty if no pair works."""
    for pairs in all_pairs(len(single))[:_ROUNDS_OF_PAIRS]:
        groups = [[single[a], single[b]] for a, b in pairs]
        found = [group for group, well in zip(groups, works(groups), strict=True) if well]
        if found:
            return [node for group in found for node in group]
    return []


def _halved(group: Sequence[int]) -> list[list[int]]:
    middle = (len(group) + 1) // 2
    return [part for part in (list(group[:middle]), list(group[middle:])) if part]
