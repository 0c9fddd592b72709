"""The schedule contains every pair once, and no node twice in a round."""

from __future__ import annotations

import itertools

import pytest

from hpcrun.network.check.measurements import all_pairs, random_matchings, rounds_for


@pytest.mark.parametrize("count", range(2, 34))
def test_every_pair_meets_once_and_no_node_meets_two_at_a_time(count: int) -> None:
    rounds = all_pairs(count)
    assert len(rounds) == (count - 1 if count % 2 == 0 else count)
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
        assert len(pairs) == count // 2
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(met) == len(set(met))
    assert set(met) == {frozenset(pair) for pair in itertools.combinations(range(count), 2)}


def test_one_node_needs_no_rendezvous() -> None:
    assert all_pairs(1) == []
    assert all_pairs(0) == []


@pytest.mark.parametrize("count", [65, 100, 1000])
def test_above_64_nodes_random_matchings_take_their_place(count: int) -> None:
    rounds = rounds_for(count, seed=3)
    assert len(rounds) == 10
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy)) == count - count % 2
    assert rounds == random_matchings(count, 3)
    assert rounds != random_matchings(count, 4)
    assert len(rounds_for(64)) == 63
