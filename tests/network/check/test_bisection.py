"""The search for the node with which an all-reduce fails."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from hpcrun.network.check.all_reduce import isolate


class Fleet:
    """A fleet in which each group with a ``bad`` node fails, or with all nodes of a ``bad`` link."""

    def __init__(self, *bad: set[int]) -> None:
        self.bad, self.steps = bad, 0

    def works(self, groups: Sequence[Sequence[int]]) -> list[bool]:
        """Return which groups work; they share no node, and have at least two nodes."""
        busy = [node for group in groups for node in group]
        assert len(busy) == len(set(busy))
        assert all(len(group) > 1 for group in groups)
        self.steps += 1
        return [not any(bad <= set(group) for bad in self.bad) for group in groups]


@pytest.mark.parametrize("count", range(3, 34))
def test_one_bad_node_is_found_in_as_many_steps_as_the_number_of_nodes_has_digits(
    count: int,
) -> None:
    for bad in range(count):
        fleet = Fleet({bad})
        assert isolate(range(count), fleet.works) == [bad]
        assert fleet.steps <= 2 * math.ceil(math.log2(count)) + 1


def test_one_bad_node_of_a_thousand_is_found() -> None:
    fleet = Fleet({777})
    assert isolate(range(1000), fleet.works) == [777]
    assert fleet.steps < 15


@pytest.mark.parametrize("count", [5, 8, 13])
def test_several_bad_nodes_are_found(count: int) -> None:
    for bad in itertools.combinations(range(count), 2):
        fleet = Fleet(*({node} for node in bad))
        assert isolate(range(count), fleet.works) == list(bad)


def test_of_two_nodes_each_may_be_at_fault() -> None:
    assert isolate([4, 7], Fleet({4}).works) == [4, 7]


def test_where_nothing_works_all_nodes_are_named() -> None:
    nodes = range(8)
    assert isolate(nodes, Fleet(*({node} for node in nodes)).works) == list(nodes)


def test_a_fault_between_the_halves_is_that_of_no_node() -> None:
    assert isolate(range(8), Fleet({1, 6}).works) == []


def test_a_fault_that_has_gone_is_that_of_no_node() -> None:
    assert isolate(range(8), Fleet().works) == []
