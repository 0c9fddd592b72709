"""Small gloo groups of one rank in a tree, and communication through them."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d


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


# Torch's type stubs lack gloo's options.
_c10d: Any = _distributed_c10d


class Subgroup:
    """One small gloo group of the tree, from one member's side."""

    def __init__(
        self, store: Any, rank: int, level: Level, timeout: timedelta, devices: list[Any]
    ) -> None:
        self.span = level.span
        self.size = len(level.members)
        self.leads = rank == level.leader
        options: Any = _c10d.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = devices, 1, timeout
        self._group: Any = _c10d.ProcessGroupGloo(
            store, level.members.index(rank), self.size, options
        )

    def set_timeout(self, limit: timedelta) -> None:
        """Set the timeout of collectives that start from now on."""
        self._group._set_default_timeout(limit)

    def to_leader(self, value: Tensor) -> list[Tensor]:
        """Gather every member's ``value`` on the leader; return an empty list on the other members."""
        found = [torch.empty_like(value) for _ in range(self.size)] if self.leads else []
        self._group.gather([found] if self.leads else [], [value], _c10d.GatherOptions()).wait()
        return found

    def from_leader(self, value: Tensor) -> None:
        """Broadcast the leader's ``value``, in place."""
        self._group.broadcast([value], _c10d.BroadcastOptions()).wait()

    def dealt(self, block: Tensor, length: int) -> Tensor:
        """Scatter the leader's ``block``; return this member's ``length`` bytes."""
        mine = torch.empty(length, dtype=torch.uint8)
        pieces = list(_fitted(block, self.size * length).chunk(self.size)) if self.leads else []
        given = [pieces] if self.leads else []
        self._group.scatter([mine], given, _c10d.ScatterOptions()).wait()
        return mine


def make_parts(
    store: Any, rank: int, size: int, timeout: timedelta, fan_out: int
) -> list[Subgroup]:
    """Make the groups of ``rank``, from its neighbors up to the group of rank 0. Collective."""
    devices = list(_devices())
    return [
        Subgroup(
            _c10d.PrefixStore(f"{level.span}/{level.leader}", store), rank, level, timeout, devices
        )
        for level in levels(rank, size, fan_out)
    ]


def reduced(parts: list[Subgroup], value: Tensor, reduction: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce ``value`` over all ranks below this rank; rank 0 gets the result over all ranks."""
    for part in parts:
        found = part.to_leader(value)
        if found:
            value = reduction(torch.stack(found))
    return value


def collected(parts: list[Subgroup], value: Tensor, size: int) -> Tensor | None:
    """Gather every rank's bytes in rank order on rank 0; return None on the other ranks."""
    width, block = value.numel(), value
    for part in parts:
        found = part.to_leader(_fitted(block, part.span * width))
        if not found:
            return None
        block = torch.cat(found)
    return block[: size * width].contiguous()


def dealt_out(parts: list[Subgroup], block: Tensor, width: int) -> Tensor:
    """Scatter rank 0's ``block``, the bytes of every rank in order; return this rank's ``width`` bytes."""
    for part in reversed(parts):
        block = part.dealt(block, part.span * width)
    return block[:width]


def handed_down(parts: list[Subgroup], value: Tensor) -> Tensor:
    """Broadcast rank 0's ``value``; it is overwritten on the other ranks."""
    value = value.contiguous()
    for part in reversed(parts):
        part.from_leader(value)
    return value


def _fitted(block: Tensor, length: int) -> Tensor:
    """Pad or cut ``block`` to ``length`` bytes: the last groups of the world may be smaller."""
    if block.numel() == length:
        return block
    filled = torch.zeros(length, dtype=torch.uint8)
    filled[: block.numel()] = block[:length]
    return filled


def _devices() -> Iterator[Any]:
    # One listening socket for all groups of a rank; by default gloo opens one per group.
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if not named:
        yield _c10d.ProcessGroupGloo.create_default_device()
        return
    for interface in named.split(","):
        yield _c10d.ProcessGroupGloo.create_device(interface=interface)
