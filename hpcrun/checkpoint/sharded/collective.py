"""Collective calls of the ranks: rank 0 decides for all, and each rank reports to all.

An exception on a rank reaches all ranks, so that no rank waits in a collective for a rank that has failed.
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
class RankGroup:
    """This rank's view of a group. ``group`` None is the default group; a single rank needs no group."""

    rank: int
    world_size: int
    group: Any

    def from_rank_0(self, compute: Callable[[], T]) -> T:
        """Call ``compute`` on rank 0, and return its result on every rank. Collective.

        Raises:
            Exception: the exception of ``compute`` on rank 0; other ranks raise a CheckpointError with
                its text.
        """
        value, failure = self._on_rank_0(compute)
        if self.world_size > 1:
            box = [value, None if failure is None else self.named(failure)]
            dist.broadcast_object_list(box, src=0, group=self.group)
            value, text = box
            if text is not None and failure is None:
                failure = CheckpointError(text)
        if failure is not None:
            raise failure
        result: T = value
        return result

    def scatter_from_rank_0(self, compute: Callable[[], Sequence[T]]) -> T:
        """Call ``compute`` on rank 0, which gives a value per rank; return this rank's value. Collective.

        Raises:
            Exception: as :meth:`from_rank_0`.
        """
        values, failure = self._on_rank_0(compute)
        if self.world_size == 1 and failure is None:
            first: T = values[0]
            return first
        if self.world_size > 1:
            text = None if failure is None else self.named(failure)
            boxes: list[Any] = [(value, None) for value in values or ()]
            boxes = boxes or [(None, text)] * self.world_size
            box: list[Any] = [None]
            given = boxes if self.rank == 0 else None
            dist.scatter_object_list(box, given, src=0, group=self.group)
            (mine, text) = box[0]
            if text is not None and failure is None:
                failure = CheckpointError(text)
        if failure is not None:
            raise failure
        result: T = mine
        return result

    def _on_rank_0(self, compute: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """Return the result of ``compute`` on rank 0, or its exception; (None, None) on other ranks."""
        if self.rank != 0:
            return None, None
        try:
            return compute(), None
        except Exception as error:  # the other ranks must not wait for a rank 0 that has left
            return None, error

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise an exception of the block on all ranks. Collective, at the end of the block.

        Raises:
            CheckpointError: with the first failed rank's text, on ranks where the block raised nothing.
        """
        trouble: Exception | None = None
        try:
            yield
        except Exception as error:  # the other ranks wait for this rank's report
            trouble = error
        reports = self.gather(None if trouble is None else self.named(trouble))
        if trouble is not None:
            raise trouble
        if troubles := [text for text in reports if text]:
            raise CheckpointError(first_of(troubles))

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` on every rank. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

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
        return f"rank {self.rank} ({socket.gethostname()}): {text}"


def one_line(error: Exception) -> str:
    """Return the first line of ``error``, with its type unless it is a CheckpointError."""
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def first_of(troubles: list[str]) -> str:
    """Return the first trouble, and the number of further ones."""
    others = len(troubles) - 1
    return troubles[0] + (f" (and {others} more)" if others else "")
