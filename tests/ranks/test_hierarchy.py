"""Every rank belongs to one tree, with few peers each."""

import math
import random

import pytest

from hpcrun.ranks.tree_group import levels


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_but_rank_zero_has_one_leader(seed: int) -> None:
    draw = random.Random(seed)
    world_size, fan_out = draw.randrange(1, 300), draw.randrange(2, 20)
    found = {rank: list(levels(rank, world_size, fan_out)) for rank in range(world_size)}
    for rank, mine in found.items():
        for level in mine:
            # All members have the same group.
            for member in level.members:
                assert level in found[member]
        # Only a leader has a next level.
        assert all(level.leader == rank for level in mine[:-1])
        if rank:
            assert mine[-1].leader < rank
    assert all(level.leader == 0 for level in found[0])


@pytest.mark.parametrize("world_size", [8, 64, 512, 4096, 8192])
def test_peers_grow_with_the_logarithm_of_the_ranks(world_size: int) -> None:
    peers = [
        sum(len(level.members) - 1 for level in levels(rank, world_size, 16))
        for rank in range(world_size)
    ]
    assert max(peers) <= 15 * math.ceil(math.log(world_size, 16))
    assert sum(peers) / world_size < 16


def test_a_tree_of_one_branch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2, not 1"):
        list(levels(0, 4, 1))
