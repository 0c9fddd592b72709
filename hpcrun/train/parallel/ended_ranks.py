"""Name a rank that has ended while other ranks wait for it in a step, in a loop of the user.

If the ranks have different numbers of batches, the rank with fewer ends, and the others wait in a collective.
gloo then reports a closed connection, or nothing until the timeout; NCCL reports nothing. Each rank therefore
records its end in the store of the process group, with the number of its steps. A thread of each rank reads
this record, with one request in two seconds. A rank that has ended waits for the others, so that it learns of
a rank that it has left, and so that rank 0, which usually holds the store, leaves last.
"""

import atexit
import json
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

from hpcrun.errors import UserError
from hpcrun.run.endings import node_name

_PAUSE = 2.0
"""Seconds between two looks at the store."""

_PATIENCE = 10.0
"""Seconds that a rank waits for the others before it prints a line."""

_AT_EXIT = 30.0
"""Maximum seconds of waiting at the exit of a program without ``cleanup_distributed()``."""

_ACKNOWLEDGED = 5.0
"""Maximum seconds for which rank 0 waits until the others have read the result."""

_ATTEMPTS = {"groups": 0}


class EndedRanks:
    """This rank's record of its steps, and its view of the other ranks' ends.

    Attributes:
        steps: calls of ``training_step`` that this process has begun.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float) -> None:
        """Start the thread.

        Args:
            store: the store of the process group.
            rank: number of this rank.
            world_size: number of ranks.
            timeout: maximum seconds of waiting for the others at the end.
        """
        self._store, self._rank, self._size, self._timeout = store, rank, world_size, timeout
        # torchrun's agent keeps its store for a second group of the same processes.
        self._key = f"hpcrun/ended/{_ATTEMPTS['groups']}"
        self._line: str | None = None
        self._done = threading.Event()
        self.steps = 0
        threading.Thread(target=self._look, name="hpcrun-ended-ranks", daemon=True).start()
        # The interpreter must not end while the thread is in the store's code.
        atexit.register(self._at_exit)

    def belongs_to(self, store: Any) -> bool:
        """Return True if ``store`` is the store of this record."""
        return self._store is store

    def forget(self) -> None:
        """Stop the thread; the program has destroyed the process group itself."""
        self._done.set()
        atexit.unregister(self._at_exit)

    def begin_step(self) -> None:
        """Count a step of this rank."""
        self.steps += 1

    def line(self) -> str | None:
        """Return a line about a rank that has ended before this rank's current step, or None."""
        if self._line is None:
            try:
                self._read()
            except RuntimeError:
                return None  # The store has ended with rank 0.
        return self._line

    def leave(self) -> None:
        """Record the end of this rank, and wait until all ranks have ended.

        Raises:
            UserError: another rank waits in a step for this rank or another ended rank.
        """
        if self._done.is_set():
            return
        failing = sys.exc_info()[1] is not None
        line = self._leave(0.0 if failing else self._timeout, failed=failing)
        if line is not None:
            raise UserError(line)

    def _leave(self, limit: float, *, failed: bool) -> str | None:
        self._done.set()
        atexit.unregister(self._at_exit)
        _ATTEMPTS["groups"] += 1
        try:
            end = {"rank": self._rank, "host": node_name(), "steps": self.steps, "failed": failed}
            self._store.compare_set(f"{self._key}/first", "", json.dumps(end))
            self._store.add(f"{self._key}/count", 1)
            line = self._wait(limit) if limit else None
            self._acknowledge(bool(limit))
        except RuntimeError:
            return None  # The store has ended with rank 0.
        return line

    def _wait(self, limit: float) -> str | None:
        """Wait until all ranks have ended, or one waits in a step; return that rank's line."""
        began, pause, printed = time.monotonic(), 0.01, False
        while self._store.add(f"{self._key}/count", 0) < self._size:
            if (line := self._waiting()) is not None:
                return line
            waited = time.monotonic() - began
            if waited > limit:
                return None
            if waited > _PATIENCE and not printed:
                printed = True
                print(
                    f"hpcrun: rank {self._rank} has ended after {self.steps} steps, and waits up to "
                    f"{limit:.0f} s for the other ranks; if they still train, {_REMEDY}",
                    flush=True,
                )
            time.sleep(pause)
            pause = min(0.5, 1.5 * pause)
        return self._waiting()

    def _waiting(self) -> str | None:
        """Return the line of a rank that waits in a step for an ended rank, or None."""
        key = f"{self._key}/waiting"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _acknowledge(self, waits: bool) -> None:
        """Report that this rank has read the result; rank 0, which may hold the store, leaves last."""
        key, until = f"{self._key}/read", time.monotonic() + _ACKNOWLEDGED
        self._store.add(key, 1)
        while waits and self._rank == 0 and time.monotonic() < until:
            ended = self._store.add(f"{self._key}/count", 0)
            if self._store.add(key, 0) >= ended:
                return
            time.sleep(0.02)

    def _look(self) -> None:
        while not self._done.wait(_PAUSE):
            try:
                self._read()
            except RuntimeError:
                return  # The store has ended with rank 0.
            if self._line is not None:
                print(f"hpcrun: {self._line}", file=sys.stderr, flush=True)
                return

    def _read(self) -> None:
        if not self._store.check([f"{self._key}/first"]):
            return
        end = json.loads(self._store.get(f"{self._key}/first"))
        if end["steps"] >= self.steps or self._line is not None:
            return
        if end["failed"]:
            why = "; its log has the reason"
        else:
            why = f": the ranks have different numbers of batches; {_REMEDY}"
        self._line = (
            f"rank {end['rank']} ({end['host']}) has ended after {end['steps']} steps, and rank "
            f"{self._rank} waits for it in step {self.steps}{why}"
        )
        self._store.set(f"{self._key}/waiting", self._line)

    def _at_exit(self) -> None:
        # The interpreter keeps the last uncaught exception there.
        failed = getattr(sys, "last_value", None) is not None
        line = self._leave(0.0 if failed else min(_AT_EXIT, self._timeout), failed=failed)
        if line is not None:
            print(f"hpcrun: {line}", file=sys.stderr, flush=True)


_REMEDY = (
    "give all ranks the same number, or write the loop as `for batch in trainer.even(loader)`, which trains "
    "until every rank has used its batches"
)

_CURRENT: list[EndedRanks] = []


def watch_ends() -> EndedRanks | None:
    """Return this process's record for its process group; None without a group. The first call makes it."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    c10d: Any = dist.distributed_c10d
    store = c10d._get_default_store()
    if _CURRENT and not _CURRENT[0].belongs_to(store):
        _CURRENT.pop().forget()
        _ATTEMPTS["groups"] += 1
    if not _CURRENT:
        seconds = store.timeout.total_seconds()
        _CURRENT.append(EndedRanks(store, dist.get_rank(), dist.get_world_size(), seconds))
    return _CURRENT[0]


def leave_ranks() -> None:
    """Record the end of this rank, if it has trained in a loop of the user; see :meth:`EndedRanks.leave`.

    Raises:
        UserError: another rank waits in a step for a rank that has ended.
    """
    if _CURRENT:
        _CURRENT.pop().leave()
