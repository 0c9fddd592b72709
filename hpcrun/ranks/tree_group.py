"""The control group: gloo's own full mesh for few ranks, a tree of small gloo groups for large worlds.

A gloo group connects every rank with every other rank. In a tree, a collective goes up to rank 0 and its
result comes down again, so a rank is connected only to its neighbors, and a leader to a few more ranks.

``torch.distributed``'s functions accept only a ``ProcessGroup``, and torch has none that consists of groups.
So :class:`TreeGroup` is a backend of torch's public registry. docs/decisions/0003-gloo-for-control.md says
why it makes its small groups itself and does not call ``dist.new_group``.
"""

import functools
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
    levels. There is no group with a single member. ``fan_out`` is at least 2.
    """
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


# Torch's type stubs lack the methods of a group, and declare the reduction operators otherwise.
_dist: Any = dist


class Subgroup:
    """One small gloo group of the tree, from one member's side."""

    def __init__(self, store: Any, rank: int, level: Level, timeout: timedelta) -> None:
        self.span = level.span
        self.size = len(level.members)
        self.leads = rank == level.leader
        place = level.members.index(rank)
        self._group: Any = _dist.ProcessGroupGloo(store, place, self.size, timeout)

    def set_timeout(self, limit: timedelta) -> None:
        """Set the timeout of collectives that start from now on."""
        self._group._set_default_timeout(limit)

    def to_leader(self, value: Tensor) -> list[Tensor]:
        """Gather every member's ``value`` on the leader; return an empty list on the other members."""
        found = [torch.empty_like(value) for _ in range(self.size)] if self.leads else []
        self._group.gather([found] if self.leads else [], [value], _dist.GatherOptions()).wait()
        return found

    def from_leader(self, value: Tensor) -> None:
        """Broadcast the leader's ``value``, in place."""
        self._group.broadcast([value], _dist.BroadcastOptions()).wait()

    def dealt(self, block: Tensor, length: int) -> Tensor:
        """Scatter the leader's ``block``; return this member's ``length`` bytes."""
        mine = torch.empty(length, dtype=torch.uint8)
        pieces = list(_fitted(block, self.size * length).chunk(self.size)) if self.leads else []
        given = [pieces] if self.leads else []
        self._group.scatter([mine], given, _dist.ScatterOptions()).wait()
        return mine


def make_parts(
    store: Any, rank: int, size: int, timeout: timedelta, fan_out: int
) -> list[Subgroup]:
    """Make the groups of ``rank``, from its neighbors up to the group of rank 0. Collective."""
    return [
        Subgroup(_dist.PrefixStore(f"{level.span}/{level.leader}", store), rank, level, timeout)
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


_REMEMBERED = 32
"""Number of latest collectives to keep by name, for the diagnosis of a hang."""

_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    _dist.ReduceOp.SUM: lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    _dist.ReduceOp.MIN: lambda stacked: stacked.amin(0),
    _dist.ReduceOp.MAX: lambda stacked: stacked.amax(0),
}


class TreeGroup(_dist.ProcessGroup):  # type: ignore[misc]  # its base is Any
    """The collectives that decisions and gathered objects need, on CPU tensors only.

    ``torch.distributed``'s functions accept it as ``group``. A thread runs the collectives in the order in
    which they were started, so an asynchronous collective runs while training computes.

    If a collective fails on a rank (a peer is gone, or the timeout is over), the rank closes its connections.
    Its peers then fail in turn, up and down the tree, so no rank waits for its own timeout.

    Args:
        store: key-value store in which the ranks find each other; no other group uses it.
        timeout: limit for waiting for the peers in one level of a collective.
        fan_out: maximum members of a small group.
        longest_end: seconds for which :meth:`shutdown` waits for the started collectives.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        fan_out: int,
        longest_end: float = 60.0,
    ) -> None:
        super().__init__(rank, size)
        self._size, self._longest_end = size, longest_end
        self._names = {"name": "", "desc": ""}
        self.options = _Limit(timeout)
        self._begun: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self._numbers = itertools.count(1)
        self._parts = make_parts(store, rank, size, timeout, fan_out)
        self._work: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_carry_out, args=(self._work, self._parts), name="hpcrun-control", daemon=True
        )
        self._thread.start()

    # torch.distributed needs the following of every group; for its own groups C++ code provides it.

    supports_splitting = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> "TreeGroup":
        return self

    @property
    def group_name(self) -> str:
        """Torch's name of this group."""
        return self._names["name"]

    @property
    def group_desc(self) -> str:
        """The purpose of this group."""
        return self._names["desc"]

    def _set_group_name(self, name: str) -> None:
        self._names["name"] = name

    def _set_group_desc(self, description: str) -> None:
        self._names["desc"] = description

    def _set_default_timeout(self, limit: timedelta) -> None:
        self.options._timeout = limit
        for part in list(self._parts):
            part.set_timeout(limit)

    def begun(self) -> list[tuple[int, str]]:
        """Return this rank's latest collectives by number, such as ``(43, "all_reduce of 1")``."""
        return list(self._begun)

    def allreduce(self, tensors: Any, opts: Any = None) -> "_Pending":
        """Reduce every rank's tensor by sum, minimum or maximum, in place on every rank."""
        (tensor,) = _listed(tensors)
        reduction = _reduction(opts)

        def run(parts: list[Subgroup]) -> None:
            total = reduced(parts, tensor.detach().reshape(-1).clone(), reduction)
            tensor.copy_(handed_down(parts, total).view_as(tensor))

        return self._begin(f"all_reduce of {tensor.numel()}", run)

    def broadcast(self, tensors: Any, opts: Any = None) -> "_Pending":
        """Broadcast rank 0's tensor, in place on every rank; raises ValueError for another root."""
        (tensor,) = _listed(tensors)
        _require_rank_0(opts)

        def run(parts: list[Subgroup]) -> None:
            _put(tensor, handed_down(parts, _bytes(tensor)))

        return self._begin(f"broadcast of {tensor.numel()}", run)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> "_Pending":
        """Gather every rank's tensor on every rank, in rank order; all have the same size."""
        (tensor,), (into,) = _listed(inputs), outputs

        def run(parts: list[Subgroup]) -> None:
            mine = _bytes(tensor)
            found = collected(parts, mine, self._size)
            if found is None:
                found = torch.empty(self._size * mine.numel(), dtype=torch.uint8)
            _deal(into, handed_down(parts, found))

        return self._begin(f"all_gather of {tensor.numel()}", run)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> "_Pending":
        """Gather every rank's tensor on rank 0, in rank order; all have the same size.

        Raises:
            ValueError: the root is not rank 0.
        """
        (tensor,) = _listed(inputs)
        _require_rank_0(opts)

        def run(parts: list[Subgroup]) -> None:
            found = collected(parts, _bytes(tensor), self._size)
            if found is not None:
                _deal(outputs[0], found)

        return self._begin(f"gather of {tensor.numel()}", run)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> "_Pending":
        """Scatter the tensors of rank 0, one per rank; all have the same size.

        Raises:
            ValueError: the root is not rank 0.
        """
        (tensor,) = _listed(outputs)
        _require_rank_0(opts)

        def run(parts: list[Subgroup]) -> None:
            blocks = [_bytes(piece) for piece in inputs[0]] if inputs else []
            block = torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.uint8)
            _put(tensor, dealt_out(parts, block, tensor.numel() * tensor.element_size()))

        return self._begin(f"scatter of {tensor.numel()}", run)

    def barrier(self, opts: Any = None) -> "_Pending":
        """Finish when every rank has started the barrier."""

        def run(parts: list[Subgroup]) -> None:
            value = torch.zeros(1, dtype=torch.uint8)
            handed_down(parts, reduced(parts, value, _REDUCTIONS[_dist.ReduceOp.MAX]))

        return self._begin("barrier", run)

    def shutdown(self) -> None:
        """Close the connections after the started collectives have ended.

        A rank waits at most ``longest_end`` seconds, so that a peer that neither answers nor ends cannot
        block the end of this rank. The connections then close with the process.
        """
        self._work.put(None)
        self._thread.join(self._longest_end)

    def getBackendName(self) -> str:
        """Return the name that torch prints."""
        return _BACKEND

    def _begin(self, name: str, run: "Callable[[list[Subgroup]], None]") -> "_Pending":
        self._begun.append((next(self._numbers), name))
        pending = _Pending(run)
        self._work.put(pending)
        return pending


class _Pending:
    """A started collective: the part of torch's ``Work`` that callers use."""

    def __init__(self, run: "Callable[[list[Subgroup]], None]") -> None:
        self._run = run
        self._over = threading.Event()
        self.error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the tensors hold the result; raises RuntimeError if a peer is gone or late."""
        if not self._over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"a collective has not ended within {timeout}")
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error
        return True

    def carry_out(self, parts: "list[Subgroup]", broken: BaseException | None) -> None:
        """Run the collective; or, after the exception ``broken`` of an earlier collective, fail with it."""
        self.error = broken
        if broken is None:
            try:
                self._run(parts)
            except BaseException as error:  # wait() raises it.
                self.error = error
        self._over.set()


@dataclass
class _Limit:
    """The part of gloo's options that torch reads: the timeout of a collective."""

    _timeout: timedelta


def _carry_out(work: "queue.SimpleQueue[_Pending | None]", parts: list[Subgroup]) -> None:
    """Run the collectives in ``work`` one at a time; close the connections at the end or first failure."""
    broken: BaseException | None = None
    while (pending := work.get()) is not None:
        pending.carry_out(parts, broken)
        if broken is None and pending.error is not None:
            # Frames hold references to groups; a group closes its connections with the last reference.
            broken = pending.error.with_traceback(None)
            parts.clear()
        del pending
    parts.clear()


def _deal(into: list[Tensor], found: Tensor) -> None:
    for tensor, piece in zip(into, found.chunk(len(into)), strict=True):
        _put(tensor, piece)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def _put(tensor: Tensor, found: Tensor) -> None:
    tensor.detach().copy_(found.clone().view(tensor.dtype).view_as(tensor))


def _listed(tensors: Any) -> list[Tensor]:
    """Return the tensors as a list: torch passes a list to a collective, or one tensor."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _require_rank_0(opts: Any) -> None:
    if opts is not None and opts.rootRank:
        raise ValueError(f"the root of a control group is rank 0, not rank {opts.rootRank}")


def _reduction(opts: Any) -> Callable[[Tensor], Tensor]:
    wanted = _dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for kind, reduction in _REDUCTIONS.items():
        if wanted == kind:
            return reduction
    raise ValueError(f"a control group reduces by SUM, MIN or MAX, not by {wanted}")


FAN_OUT = 16
"""Maximum members of a small group in the tree, and maximum ranks in a full mesh."""

_BACKEND = "hpcrun_tree"


def new_control_group(*, timeout: timedelta | None = None, description: str | None = None) -> Any:
    """Make a group of all ranks for decisions on CPU tensors. Collective.

    With up to ``FAN_OUT`` ranks it is a gloo group, with a connection between any two ranks. With more
    ranks it is a tree: the connections of a rank grow with the logarithm of the number of ranks.

    Args:
        timeout: limit for a collective; None: torch's default, 30 minutes.
        description: torch's description of the group's purpose.
    """
    if dist.get_world_size() <= FAN_OUT:
        return dist.new_group(backend="gloo", timeout=timeout, group_desc=description)
    if _BACKEND not in dist.Backend.backend_list:
        tree = functools.partial(TreeGroup, fan_out=FAN_OUT)
        dist.Backend.register_backend(_BACKEND, tree, devices=["cpu"])
    return dist.new_group(backend=_BACKEND, timeout=timeout, group_desc=description)
