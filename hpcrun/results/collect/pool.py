"""Processes that read run directories, because parsing takes most of the time.

multiprocessing's own pool leaves its processes behind when the parent is killed. Here each process has
one pipe, and ends when the other end of the pipe closes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from hpcrun.errors import ResultsError

Job = TypeVar("Job")
Done = TypeVar("Done")

# Each process takes half a second to start.
_FEW = 300
_BATCH = 4
_MOST = 4


def processes_for(jobs: int) -> int:
    """Return the number of processes that saves time; 0: only this process."""
    cores = len(os.sched_getaffinity(0))
    return 0 if jobs < _FEW or cores < 2 else min(cores, _MOST)


def each(read: Callable[[Job], Done], jobs: Sequence[Job], processes: int) -> Iterator[Done]:
    """Yield ``read(job)`` for all ``jobs``, in the order of their completion.

    Args:
        read: a function of a module, which another process can import.
        processes: 0 calls ``read`` here.

    Raises:
        ResultsError: a process has died, or ``read`` has refused.
    """
    if not processes:
        yield from map(read, jobs)
        return
    context = multiprocessing.get_context("spawn")
    batches = [jobs[at : at + _BATCH] for at in range(0, len(jobs), _BATCH)]
    batches.reverse()
    readers: dict[Connection, Any] = {}
    # Ctrl-C reaches the whole group: the parent ends the readers, which inherit the mask. The start of the
    # tracker, which multiprocessing needs, clears the mask.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(processes):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, read), daemon=True)
            process.start()
            there.close()
            readers[here] = process
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield from _collect(list(readers), batches)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for connection, process in readers.items():
            connection.close()
            process.join()


def _collect(readers: list[Connection], batches: list[Sequence[Any]]) -> Iterator[Any]:
    try:
        waiting = sum(_give(connection, batches) for connection in readers)
        while waiting:
            for ready in wait(readers):
                assert isinstance(ready, Connection)
                found = ready.recv()
                if isinstance(found, ResultsError):
                    raise found
                # The next batch is read while the caller writes this one.
                waiting += _give(ready, batches) - 1
                yield from found
    except (EOFError, OSError):
        raise ResultsError(
            "a process that reads runs has died, perhaps for lack of memory; use --processes 0"
        ) from None


def _give(connection: Connection, batches: list[Sequence[Any]]) -> int:
    if not batches:
        return 0
    connection.send(batches.pop())
    return 1


def _serve(connection: Connection, read: Callable[[Any], Any]) -> None:
    # Rows are many short-lived objects without cycles; looking for cycles costs a tenth of the time.
    gc.disable()
    while True:
        try:
            batch = connection.recv()
        except (EOFError, OSError):
            return
        found: list[Any] | ResultsError
        try:
            found = [read(job) for job in batch]
        except ResultsError as error:
            found = error
        try:
            connection.send(found)
        except OSError:
            return
