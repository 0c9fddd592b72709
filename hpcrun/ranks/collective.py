"""Collective calls of the ranks: if a call fails on one rank, it raises on all ranks.

Otherwise the other ranks would wait in a collective for a rank that has failed, and their logs would not show
the cause.

Each rank contributes its own flag to a one-element MAX reduction. The reduction starts at one step and is
read at the next, so that it overlaps the step's work. It uses a separate CPU group: in the group of the
gradients it would have to keep the order of their collectives.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist

from hpcrun.errors import PeerFailed, UserError, error_on_all_ranks, one_line
from hpcrun.ranks.signals import STOP, StopReason
from hpcrun.run.endings import node_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


T = TypeVar("T")


class End(NamedTuple):
    """The end of a call on a rank, as the other ranks learn it.

    ``line``: the exception in a line; None if the call succeeded. ``refusal``: the text of a UserError.
    ``certain``: no node can change the failure.
    """

    host: str
    line: str | None = None
    refusal: str | None = None
    certain: bool = False


@dataclass(frozen=True)
class Ranks:
    """This rank, the number of ranks, and their group; the defaults describe a single rank.

    A call that fails on a rank raises on all ranks. A failed rank raises its own exception, and the other
    ranks raise PeerFailed. After a UserError all ranks raise that of the lowest such rank instead: rank 0 as
    ErrorOnAllRanks, the others as PrintedByRankZero. A single rank always raises its own exception.

    Attributes:
        group: a CPU group of all ranks; None: torch's default group. A single rank needs none.
        peer_error: class to raise on the ranks that have not failed, with the line of the first failed rank;
            a failed rank then raises its own exception, also a UserError. None: as above.
    """

    rank: int = 0
    world_size: int = 1
    group: Any = None
    peer_error: type[UserError] | None = None

    def together(self, compute: Callable[[], T]) -> T:
        """Call ``compute`` on every rank; return this rank's result if all ranks succeed. Collective.

        Raises:
            Exception: the call failed on a rank; see the class.
        """
        with self.agreed():
            return compute()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise an exception of the block on all ranks. Collective, at the end of the block.

        Raises:
            Exception: the block failed on a rank; see the class.
        """
        if self.world_size == 1:
            yield
            return
        own: Exception | None = None
        try:
            yield
        except Exception as error:  # the other ranks wait for this rank's report
            own = error
        self._raise(self.gather(_end(own)), own)

    def from_rank_0(self, compute: Callable[[], T]) -> T:
        """Call ``compute`` on rank 0, and return its result on every rank. Collective.

        Raises:
            Exception: the call failed; see the class.
        """
        if self.world_size == 1:
            return compute()
        value, own = self._on_rank_0(compute)
        box = [value, _end(own)]
        dist.broadcast_object_list(box, src=0, group=self.group)
        value, end = box
        self._raise_end(end, own)
        result: T = value
        return result

    def scatter_from_rank_0(self, compute: Callable[[], Sequence[T]]) -> T:
        """Call ``compute`` on rank 0, which gives a value per rank; return this rank's value. Collective.

        Raises:
            Exception: the call failed; see the class.
        """
        if self.world_size == 1:
            return compute()[0]
        values, own = self._on_rank_0(compute)
        boxes: list[Any] | None = None
        if self.rank == 0:
            boxes = [(value, _end(own)) for value in values or [None] * self.world_size]
        box: list[Any] = [None]
        dist.scatter_object_list(box, boxes, src=0, group=self.group)
        value, end = box[0]
        self._raise_end(end, own)
        result: T = value
        return result

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` on every rank. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def mean(self, value: float) -> float:
        """Return the mean of ``value`` over the ranks, on every rank. Collective."""
        if self.world_size == 1:
            return value
        import torch

        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return float(total) / self.world_size

    def to_rank_0(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` on rank 0, and an empty list on other ranks. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def on_this_host(self) -> int:
        """Return the number of ranks on this rank's host. Collective."""
        return self.gather(socket.gethostname()).count(socket.gethostname())

    def named(self, trouble: Exception | str) -> str:
        """Return ``trouble`` as a line with this rank and its host."""
        text = trouble if isinstance(trouble, str) else one_line(trouble)
        return _named(self.rank, node_name(), text)

    def _on_rank_0(self, compute: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """Return the result of ``compute`` on rank 0, or its exception; (None, None) on other ranks."""
        if self.rank != 0:
            return None, None
        try:
            return compute(), None
        except Exception as error:  # the other ranks must not wait for a rank 0 that has left
            return None, error

    def _raise_end(self, end: End, own: Exception | None) -> None:
        """Raise on this rank if the call on rank 0 failed."""
        if end.line is not None:
            # Rank 0 alone made the call: other nodes might not have the cause.
            self._raise([end, End("")], own)

    def _raise(self, ends: Sequence[End], own: Exception | None) -> None:
        """Raise on this rank, whose exception is ``own``, if the call failed on a rank."""
        failed = [rank for rank, end in enumerate(ends) if end.line is not None]
        refused = [rank for rank in failed if ends[rank].refusal is not None]
        if self.peer_error is None and refused:
            first = refused[0]
            text, host = ends[first].refusal or "", ends[first].host
            raise error_on_all_ranks(
                text if first == 0 else _named(first, host, text),
                self.rank,
                certain=any(ends[rank].certain for rank in refused),
                host=host,
            ) from own
        if own is not None:
            raise own
        if failed and self.peer_error is None:
            raise PeerFailed(f"rank {failed[0]} failed; see its log")
        if failed and self.peer_error is not None:
            lines = [_named(rank, ends[rank].host, ends[rank].line or "") for rank in failed]
            raise self.peer_error(first_of(lines))


def first_of(troubles: list[str]) -> str:
    """Return the first trouble, and the number of further ones."""
    others = len(troubles) - 1
    return troubles[0] + (f" (and {others} more)" if others else "")


def _end(error: Exception | None) -> End:
    if error is None:
        return End(node_name())
    if not isinstance(error, UserError):
        return End(node_name(), one_line(error))
    return End(node_name(), one_line(error), str(error), error.certain)


def _named(rank: int, host: str, text: str) -> str:
    # An inner call of the same rank may have named it.
    name = f"rank {rank} ({host}): "
    return text if text.startswith(name) else f"{name}{text}"


class StopAgreement:
    """Turns the ranks' reasons to stop into one reason that every rank reads at the same step.

    Without the agreement, a rank that stops at a signal leaves the other ranks waiting in a collective.

    Attributes:
        seconds: total time of the exchanges on this rank.
        notes: the largest number of any rank in each place of ``notes`` at the previous exchange.
    """

    def __init__(self, group: "ProcessGroup | None", every: int = 1) -> None:
        """Store the arguments.

        Args:
            group: a CPU group of all ranks, such as ``trainer.control_group()``; None for a single rank.
            every: steps between two exchanges.
        """
        self._group = group
        self._every = every
        self._pending: tuple[Any, Any] | None = None
        self._agreed = StopReason.NONE
        self.seconds = 0.0
        self.notes: list[int] = []

    def exchange(self, step: int, local: StopReason, notes: Sequence[int] = ()) -> StopReason:
        """Return the reason agreed on at the previous exchange, and start the next with ``local``.

        Collective: every rank calls this with the same ``step``. The next exchange returns a reason that is
        new at this call, on every rank. The all-reduce of one number runs during the step.

        Args:
            step: number of the step.
            local: this rank's reason, such as ``hpcrun.STOP.reason``.
            notes: further numbers of this rank, as many at every call, for :attr:`notes`.

        Raises:
            RuntimeError: another rank has ended (torch.distributed).
        """
        if self._group is None:
            self._agreed, self.notes = local, list(notes)
            return local
        if step % self._every:
            return StopReason.NONE
        import torch

        began = time.perf_counter()
        self.read()
        value = torch.tensor([int(local), *notes], dtype=torch.int64)
        work = dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (work, value)
        self.seconds += time.perf_counter() - began
        return self._agreed

    def read(self) -> StopReason:
        """Wait for the exchange in progress, and return its reason; sets :attr:`notes`.

        Raises:
            RuntimeError: another rank has ended (torch.distributed).
        """
        if self._pending is not None:
            work, value = self._pending
            work.wait()
            reason, *self.notes = value.tolist()
            self._agreed = StopReason(reason)
        return self._agreed

    def finish(self) -> None:
        """Wait for the reduction in progress, so that none is in flight when the group is destroyed.

        Raises:
            RuntimeError: another rank has ended (torch.distributed).
        """
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None

    def hand_over(self) -> None:
        """Call the handlers that ``STOP.install()`` has replaced, after the save of a stop. Collective.

        In a submitit job this requeues the job: submitit's handler of task 0 ends the process. The other
        ranks return after it has ended, because Slurm may end a job at the first task that fails. Without
        such handlers it does nothing.

        Raises:
            SystemExit, Exception: whatever a handler raises.
        """
        if self._group is None:
            STOP.hand_over(self._agreed)
            return
        if not any(self._gather(STOP.replaced)):
            return
        STOP.hand_over(self._agreed)
        # The connection of a rank that a handler has ended breaks, and there is nothing left to do.
        with suppress(RuntimeError):
            self._gather(None)

    def _gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=self._group)
        return found
