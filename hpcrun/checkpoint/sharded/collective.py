"""What ranks do together: rank 0 decides and all know, each reports and all know.

No exception of one rank leaves it while the others wait in a collective.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from hpcrun.checkpoint.storage.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class Together:
    """One rank's end of a group; ``group`` None is the default one, and unused for a single rank."""

    rank: int
    world_size: int
    group: Any

    def from_rank_0(self, compute: Callable[[], T]) -> T:
        """What ``compute`` returns on rank 0, on every rank. Collective.

        Raises:
            Exception: what it raised there; on other ranks a CheckpointError with its text.
        """
        value, failure = self._on_rank_0(compute)
        if self.world_size > 1:
            box = [value, None if failure is None else self.named(failure)]
            dist.broadcast_object_list(box, src=0, group=self.group)
            value, told = box
            if told is not None and failure is None:
                failure = CheckpointError(told)
        if failure is not None:
            raise failure
        result: T = value
        return result

    def dealt_by_rank_0(self, compute: Callable[[], Sequence[T]]) -> T:
        """Of what ``compute`` returns on rank 0, one value for each rank, this rank's. Collective.

        Raises:
            Exception: as :meth:`from_rank_0`.
        """
        values, failure = self._on_rank_0(compute)
        if self.world_size == 1 and failure is None:
            first: T = values[0]
            return first
        if self.world_size > 1:
            told = None if failure is None else self.named(failure)
            boxes: list[Any] = [(value, None) for value in values or ()]
            boxes = boxes or [(None, told)] * self.world_size
            box: list[Any] = [None]
            given = boxes if self.rank == 0 else None
            dist.scatter_object_list(box, given, src=0, group=self.group)
            (mine, told) = box[0]
            if told is not None and failure is None:
                failure = CheckpointError(told)
        if failure is not None:
            raise failure
        result: T = mine
        return result

    def _on_rank_0(self, compute: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """The result of ``compute`` on rank 0, or the exception that it raised there; None elsewhere."""
        if self.rank != 0:
            return None, None
        try:
            return compute(), None
        except Exception as error:  # the other ranks must not wait for a rank 0 that has left
            return None, error

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """What the block raises on one rank is raised on all. Collective, at the end of the block.

        Raises:
            CheckpointError: with the text of the first, where the own block raised nothing.
        """
        trouble: Exception | None = None
        try:
            yield
        except Exception as error:  # the others are waiting to hear
            trouble = error
        told = self.gather(None if trouble is None else self.named(trouble))
        if trouble is not None:
            raise trouble
        if troubles := [text for text in told if text]:
            raise CheckpointError(first_of(troubles))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, on every rank. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def to_rank_0(self, value: Any) -> list[Any]:
        """Every rank's ``value`` on rank 0, an empty list on the others. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def on_this_host(self) -> int:
        """How many of the ranks run on this one's host. Collective."""
        return self.gather(socket.gethostname()).count(socket.gethostname())

    def named(self, trouble: Exception | str) -> str:
        """``trouble`` in a line that says on which rank and host."""
        text = trouble if isinstance(trouble, str) else one_line(trouble)
        return f"rank {self.rank} ({socket.gethostname()}): {text}"


def one_line(error: Exception) -> str:
    """The first line of ``error``, with its type unless it is one of ours."""
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def first_of(troubles: list[str]) -> str:
    """The first trouble, and how many more there are."""
    others = len(troubles) - 1
    return troubles[0] + (f" (and {others} more)" if others else "")
