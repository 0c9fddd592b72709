"""Collection of run directories into results.h5; only changed files are read again."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpcrun.descendants import die_with_parent
from hpcrun.drafts import replacing
from hpcrun.errors import ResultsError
from hpcrun.printing import Progress
from hpcrun.results.collect.run_reader import RunData, Signature, files_of, read_run, signature
from hpcrun.results.store import TABLES, Draft, ResultsFile, dictionary, table
from hpcrun.run.lock_file import LockFile

# Each process takes half a second to start.
_FEW = 300
_BATCH = 4
_MOST_PROCESSES = 4
_MOST_ERRORS = 20

Job = TypeVar("Job")
Done = TypeVar("Done")


@dataclass(frozen=True)
class RunSource:
    """Runs of one kind: their paths, the files of each, and the function that reads one."""

    paths: Sequence[str]
    files: Callable[[str], list[tuple[str, str]]] = files_of
    read: Callable[[str], RunData] = read_run


@dataclass
class Summary:
    """The outcome of an aggregation. ``problems``: run, file and problem."""

    path: Path
    states: Counter[str] = field(default_factory=Counter)
    read: int = 0
    unchanged: int = 0
    rows: int = 0
    kept: list[str] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    written: bool = True


def aggregate(
    source: RunSource,
    output: Path,
    *,
    fresh: bool = False,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Bring ``output`` up to date with the runs of ``source``.

    Args:
        fresh: read everything, and drop the runs of earlier calls.
        processes: number of reading processes; None: as many as save time. 0: only this process.
        progress: called with the number of runs that were read, and the number of runs to read.

    Raises:
        ResultsError: ``output`` cannot be used.
        OSError: the disk refused; ``output`` is unchanged.
    """
    # A symbolic link stays: its target is replaced.
    output = Path(os.path.realpath(output))
    if output.is_dir():
        raise ResultsError(
            f"{output}: is a directory; name a file, such as {output / 'results.h5'}"
        )
    if not output.parent.is_dir():
        raise ResultsError(f"{output.parent}: no such directory; make it, or choose another -o")
    lock = output.with_name(f".{output.name}.lock")
    busy = f"{output}: another `hpcrun aggregate` is writing it; wait, or remove {lock} if its host is gone"
    with LockFile(lock, busy), ExitStack() as opened:
        # Also with `fresh`, a file of another program stays.
        old = opened.enter_context(ResultsFile(output)) if os.path.lexists(output) else None
        update = _Update(source, output, None if fresh else old)
        return update.run(processes, progress)


class _Update:
    def __init__(self, source: RunSource, output: Path, old: ResultsFile | None) -> None:
        self._source, self._output, self._old = source, output, old
        self._rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
        self._tables = {name: old.table(name) for name in TABLES} if old else {}
        # The key of each run by its path.
        self._keys: dict[str, str] = dict(self._pairs("runs", "path", "run"))
        self._taken = set(self._keys.values())

    def _pairs(self, name: str, *columns: str) -> Iterator[Any]:
        """Yield the cells of some columns of a table of the existing file; texts are decoded."""
        if self._old is None:
            return iter(())
        cells = [self._tables[name][column] for column in columns]
        plain = [
            list(map(bytes.decode, cell.tolist())) if cell.dtype.kind == "S" else cell.tolist()
            for cell in cells
        ]
        return zip(*plain, strict=True)

    def run(self, processes: int | None, progress: Progress | None) -> Summary:
        paths = self._source.paths
        changed = self._changed()
        here = {escaped_path(path) for path in paths}
        summary = Summary(self._output, read=len(changed))
        summary.unchanged = len(here) - len(changed)
        summary.kept = [path for path in self._keys if path not in here]
        if changed or self._old is None:
            cores = len(os.sched_getaffinity(0))
            if processes is None:
                processes = min(cores, _MOST_PROCESSES) if len(changed) >= _FEW and cores > 1 else 0
            again = map(escaped_path, changed)
            dropped = {self._keys[path] for path in again if path in self._keys}
            found = each(self._source.read, changed, processes)
            self._write(found, dropped, lambda done: progress and progress(done, len(changed)))
        else:
            summary.written = False
        _fill(summary, self._tables)
        return summary

    def _changed(self) -> list[str]:
        before: dict[str, set[Signature]] = {key: set() for key in self._keys.values()}
        for run, *found in self._pairs("files", "run", "file", "size", "mtime_ns", "inode"):
            before[run].add(tuple(found))
        found = {path: before[key] for path, key in self._keys.items()}
        return [
            path
            for path in self._source.paths
            if found.get(escaped_path(path))
            != {signature(*file) for file in self._source.files(path)}
        ]

    def _write(
        self, found: Iterator[RunData], dropped: set[str], progress: Callable[[int], None]
    ) -> None:
        errors: list[str] = []
        try:
            with (
                _interrupts() as interrupts,
                replacing(self._output, 0o666) as path,
                closing(Draft(path)) as draft,
            ):
                if self._old and (kept := [key for key in self._old.keys() if key not in dropped]):  # noqa: SIM118
                    draft.copy(self._old, kept)
                for done, data in enumerate(found, 1):
                    errors += data.errors
                    self._put(draft, data)
                    progress(done)
                    if interrupts:
                        raise KeyboardInterrupt
                if errors:
                    more = len(errors) - _MOST_ERRORS
                    raise ResultsError(*errors[:_MOST_ERRORS], *[f"{more:,} more"] * (more > 0))
                self._tables = {name: self._table(name, dropped) for name in TABLES}
                draft.finish(self._tables)
        except RuntimeError as error:
            # HDF5 reports a full disk in its own words.
            raise OSError(errno.EIO, " ".join(str(error).split()), str(self._output)) from error

    def _put(self, draft: Draft, data: RunData) -> None:
        key = self._key(data)
        size = draft.put(key, data)
        own = {"run": key, "name": data.name, "path": data.path}
        facts = data.facts | own | {"problems": len(data.problems), "bytes": size}
        self._rows["runs"].append(tuple(facts[column] for column in dictionary()["runs"]))
        self._rows["summary"] += [(key, *row) for row in data.summary]
        self._rows["files"] += [(key, *row) for row in data.signatures]
        self._rows["problems"] += [(key, *row) for row in data.problems]

    def _key(self, data: RunData) -> str:
        """Return the run's name in the file: its folder's name, with a number if two runs share the name."""
        path = escaped_path(data.path)
        if path not in self._keys:
            stem = escaped_path(data.name).replace("/", "__")
            key, number = stem, 1
            while key in self._taken:
                number += 1
                key = f"{stem}~{number}"
            self._taken.add(key)
            self._keys[path] = key
        return self._keys[path]

    def _table(self, name: str, dropped: set[str]) -> NDArray[Any]:
        records = table(name, self._rows[name])
        if self._old is not None:
            before = self._tables[name]
            # isin() sorts the texts, which takes ten times as long.
            kept = [key.decode() not in dropped for key in before["run"].tolist()]
            records = np.concatenate([before[np.array(kept, bool)], records])
        return records[np.argsort(records["run"], kind="stable")]


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yield a list that gets SIGINT: in a callback of h5py, Python drops a KeyboardInterrupt."""
    found: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    caught = callable(before) and threading.current_thread() is threading.main_thread()
    if caught:
        signal.signal(signal.SIGINT, lambda number, _: found.append(number))
    try:
        yield found
    finally:
        if caught:
            signal.signal(signal.SIGINT, before)


def escaped_path(path: str) -> str:
    """Return a path as valid UTF-8, with escapes for other bytes."""
    return path.encode(errors="backslashreplace").decode()


def _fill(summary: Summary, tables: Mapping[str, NDArray[Any]]) -> None:
    runs, problems = tables["runs"], tables["problems"]
    summary.states.update(state.decode() for state in runs["state"].tolist())
    summary.rows = int(runs["rows"].sum())
    paths = dict(zip(runs["run"].tolist(), runs["path"].tolist(), strict=True))
    summary.problems = [
        (paths[key].decode(), name.decode(), what.decode()) for key, name, what in problems.tolist()
    ]


def each(read: Callable[[Job], Done], jobs: Sequence[Job], processes: int) -> Iterator[Done]:
    """Yield ``read(job)`` for all ``jobs``, in their order.

    Args:
        read: a function of a module, which another process can import.
        processes: 0 calls ``read`` here.

    Raises:
        ResultsError: a process has died, or ``read`` has refused.
    """
    if not processes:
        yield from map(read, jobs)
        return
    # Ctrl-C reaches the whole group: this process ends the readers, which inherit the mask. The start of
    # the tracker, which multiprocessing needs, clears the mask.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, spawn, _become_reader, (os.getpid(),))
    waiting: deque[Future[list[Done]]] = deque()
    try:
        for at in range(0, len(jobs), _BATCH):
            waiting.append(pool.submit(_read_batch, read, jobs[at : at + _BATCH]))
            # Results that nobody has written yet would fill the memory.
            if len(waiting) > 2 * processes:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                yield from waiting.popleft().result()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        while waiting:
            yield from waiting.popleft().result()
    except BrokenProcessPool:
        raise ResultsError(
            "a process that reads runs has died, perhaps for lack of memory; use --processes 0"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        pool.shutdown(cancel_futures=True)


def _read_batch(read: Callable[[Job], Done], jobs: Sequence[Job]) -> list[Done]:
    return list(map(read, jobs))


def _become_reader(parent: int) -> None:
    # The executor leaves its processes behind when their parent is killed.
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    # Rows are many short-lived objects without cycles; looking for cycles costs a tenth of the time.
    gc.disable()
