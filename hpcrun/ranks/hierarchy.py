"""Shape of a tree of small groups: the groups of each rank."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Level:
    """One group of a rank: the members in order. The first member leads, and is a member of the next level.

    ``span``: number of consecutive ranks that a member represents; the last may represent fewer.
    """

    members: range
    span: int

    @property
    def leader(self) -> int:
        """The member that collects from the other members and sends them the results."""
        return self.members[0]


def levels(rank: int, world_size: int, fan_out: int) -> Iterator[Level]:
    """Yield the groups of ``rank``, from its neighbors up to the group of rank 0.

    Consecutive ranks share a group, because launchers put consecutive ranks on a node. Only leaders have
    more than one group: a rank has at most ``fan_out - 1`` peers in each of ``log(world_size, fan_out)``
    levels. There is no group with a single member.

    Raises:
        ValueError: ``fan_out`` is below 2.
    """
    if fan_out < 2:
        raise ValueError(f"a tree needs a fan-out of at least 2, not {fan_out}")
    span = 1
    while span < world_size:
        wide = span * fan_out
        first = rank // wide * wide
        members = range(first, min(first + wide, world_size), span)
        if len(members) > 1:
            yield Level(members, span)
        if rank != first:
            return
        span = wide
