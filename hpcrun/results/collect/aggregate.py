"""Collection of run directories into results.h5; only changed files are read again.

multiprocessing's own pool leaves its processes behind when the parent is killed. Here each process has
one pipe, and ends when the other end of the pipe closes.
"""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpcrun.errors import ResultsError
from hpcrun.results.collect.run_reader import (
    CONFIG,
    RunData,
    RunToRead,
    Signature,
    files_of,
    read_run,
    signature,
)
from hpcrun.results.collect.summary import TABLES, table
from hpcrun.results.store import Draft, ResultsFile, sweep
from hpcrun.run.lock_file import LockFile

# Of the file: dropped runs leave holes, which a new file does not have.
_MOST_WASTE = 0.3
# Bytes of runs that wait for the copy of the old file.
_MOST_HELD = 64 << 20

Progress = Callable[[int, int], None]
Row = tuple[Any, ...]


@dataclass(frozen=True)
class RunSource:
    """Runs of one kind: their paths, the files of each, and the function that reads one."""

    paths: Sequence[str]
    files: Callable[[str], list[tuple[str, str]]] = files_of
    read: Callable[[RunToRead], RunData] = read_run
    units: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Summary:
    """The outcome of an aggregation. ``problems``: run, file and problem."""

    path: Path
    states: Counter[str] = field(default_factory=Counter)
    read: int = 0
    unchanged: int = 0
    rows: int = 0
    kept: list[str] = field(default_factory=list)
    pruned: int = 0
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    written: bool = True


def aggregate(
    source: RunSource,
    output: Path,
    *,
    fresh: bool = False,
    prune: bool = False,
    processes: int | None = None,
    progress: Progress | None = None,
    spare: int = 8 << 20,
) -> Summary:
    """Bring ``output`` up to date with the runs of ``source``.

    Args:
        fresh: read everything, and replace a file that cannot be read or has another layout.
        prune: remove the runs without a directory.
        processes: number of reading processes; None: as many as save time. 0: only this process.
        progress: called with the number of runs that were read, and the number of runs to read.
        spare: bytes of holes that a file may have in any case.

    Raises:
        ResultsError: ``output`` cannot be used.
        OSError: the disk refused; ``output`` is unchanged.
    """
    # A symbolic link stays: its target is replaced.
    output = Path(os.path.realpath(output))
    _require_place(output)
    lock = output.with_name(f".{output.name}.lock")
    busy = f"{output}: another `hpcrun aggregate` is writing it; wait, or remove {lock} if its host is gone"
    with LockFile(lock, busy), _without_gc():
        sweep(output)
        known = _known(output, fresh=fresh)
        update = _Update(source, output, known, prune=prune, spare=spare)
        return update.run(processes, progress)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Turn the garbage collector off in the block: a search for cycles among so many objects takes long."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _require_place(output: Path) -> None:
    if output.is_dir():
        raise ResultsError(
            f"{output}: is a directory; name a file, such as {output / 'results.h5'}"
        )
    if not output.parent.is_dir():
        raise ResultsError(f"{output.parent}: no such directory; make it, or choose another -o")


@dataclass
class _Known:
    """The tables of the existing file, by run."""

    tables: dict[str, NDArray[Any]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    signatures: dict[bytes, set[Signature]] = field(default_factory=dict)
    size: int = 0


def _known(output: Path, *, fresh: bool) -> _Known:
    if not os.path.lexists(output):
        return _Known()
    with ResultsFile(output, any_layout=fresh) as store:
        if fresh:
            return _Known()
        tables = {name: store.table(name) for name in TABLES}
    runs, files = tables["runs"], tables["files"]
    keys = {
        raw.decode(): key.decode()
        for raw, key in zip(runs["path"].tolist(), runs["run"].tolist(), strict=True)
    }
    signatures: dict[bytes, set[Signature]] = {key: set() for key in runs["run"].tolist()}
    # Few of a hundred thousand names differ.
    names = {raw: raw.decode() for raw in set(files["file"].tolist())}
    columns = (files[name].tolist() for name in ("run", "file", "size", "mtime_ns", "inode"))
    for run, name, size, changed, inode in zip(*columns, strict=True):
        signatures[run].add((names[name], size, changed, inode))
    return _Known(tables, keys, signatures, output.stat().st_size)


class _Update:
    def __init__(
        self, source: RunSource, output: Path, known: _Known, *, prune: bool, spare: int
    ) -> None:
        self._source, self._output, self._known = source, output, known
        self._prune, self._spare = prune, spare
        self._rows: dict[str, list[Row]] = {name: [] for name in TABLES}
        self._keys = dict(known.keys)
        self._taken = set(known.keys.values())

    def run(self, processes: int | None, progress: Progress | None) -> Summary:
        repack = self._wasteful()
        draft = Draft(self._output, self._output if self._known.tables and not repack else None)
        try:
            return self._run(draft, repack, processes, progress)
        except BaseException as error:
            draft.discard()
            if isinstance(error, RuntimeError):
                # HDF5 reports a full disk in its own words.
                raise OSError(errno.EIO, " ".join(str(error).split()), str(self._output)) from error
            raise

    def _run(
        self, draft: Draft, repack: bool, processes: int | None, progress: Progress | None
    ) -> Summary:
        changed = []
        for path in self._source.paths:
            if self._has_changed(path):
                changed.append(path)
                # The old file is copied in the background, while changed runs are found and read.
                draft.begin()
        here = set(self._source.paths)
        away = [path for path in self._known.keys if path not in here]
        gone = [path for path in away if self._prune and not os.path.isdir(path)]  # noqa: PTH112
        summary = Summary(self._output, read=len(changed), pruned=len(gone))
        summary.unchanged = len(here) - len(changed)
        summary.kept = [path for path in away if path not in set(gone)]
        tables = self._known.tables
        if changed or gone or not tables:
            dropped = {self._keys.pop(path) for path in gone}
            escaped = map(escaped_path, changed)
            dropped |= {self._keys[path] for path in escaped if path in self._keys}
            found = self._read(changed, processes, progress)
            tables = self._write(draft, found, dropped, repack=repack)
        else:
            summary.written = False
        _fill(summary, tables)
        return summary

    def _has_changed(self, path: str) -> bool:
        key = self._known.keys.get(escaped_path(path))
        if key is None:
            return True
        before = self._known.signatures[key.encode()]
        return before != {signature(*file) for file in self._source.files(path)}

    def _write(
        self, draft: Draft, found: Iterator[RunData], dropped: set[str], *, repack: bool
    ) -> dict[str, NDArray[Any]]:
        held: deque[RunData] = deque()
        size = 0
        while draft.copying and size < _MOST_HELD and (data := next(found, None)) is not None:
            held.append(data)
            size += data.nbytes
        draft.open()
        if repack:
            self._take_over(draft, dropped)
        else:
            # First make all holes, then fill them.
            for key in dropped:
                draft.drop(key)
        while held:
            self._note(draft, held.popleft())
        for data in found:
            self._note(draft, data)
        tables = self._tables(dropped)
        draft.tables(tables)
        draft.publish()
        return tables

    def _wasteful(self) -> bool:
        if not self._known.tables or self._known.size < self._spare:
            return False
        live = int(self._known.tables["runs"]["bytes"].sum())
        return self._known.size > (1 + _MOST_WASTE) * live + self._spare

    def _take_over(self, draft: Draft, without: set[str]) -> None:
        with ResultsFile(self._output, check=False) as store:
            draft.keep_units(store.units())
            for key in store.keys():  # noqa: SIM118  (not a dict)
                if key not in without:
                    draft.copy(store, key)

    def _read(
        self, paths: list[str], processes: int | None, progress: Progress | None
    ) -> Iterator[RunData]:
        count = processes_for(len(paths)) if processes is None else processes
        jobs = [RunToRead(path) for path in paths] if count else self._jobs(paths)
        for done, data in enumerate(each(self._source.read, jobs, count), 1):
            yield data
            if progress is not None:
                progress(done, len(paths))

    def _jobs(self, paths: list[str]) -> list[RunToRead]:
        """Return the runs to read; for a run in the file, with its config from there."""
        if not self._known.tables:
            return [RunToRead(path) for path in paths]
        jobs = []
        with ResultsFile(self._output, check=False) as store:
            for path in paths:
                key = self._known.keys.get(escaped_path(path), "")
                config = store.document(key, "config") if key else None
                before = self._known.signatures.get(key.encode(), ())
                same = [one for one in before if one[0] == CONFIG]
                jobs.append(
                    RunToRead(path, (same[0], config) if config is not None and same else None)
                )
        return jobs

    def _note(self, draft: Draft, data: RunData) -> None:
        key = self._key(data)
        try:
            size = draft.put(key, data, self._source.units)
        except ValueError as error:
            # Only metrics have names that hpcrun does not choose.
            draft.drop(key)
            what = f"metrics cannot be written: {' '.join(str(error).split())[:200]}"
            data.problems.append(("", what))
            data.metrics, data.facts["rows"] = None, 0
            size = draft.put(key, data, self._source.units)
        facts = data.facts
        self._rows["runs"].append(
            (
                *(key, data.name, data.path, facts["state"], facts["cause"], facts["reason"]),
                *(facts["executor"], facts["created"], facts["ended"], facts["attempts"]),
                *(facts["step"], facts["rows"], facts["seed"], len(data.problems), size),
            )
        )
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

    def _tables(self, without: set[str]) -> dict[str, NDArray[Any]]:
        found = {}
        for name in TABLES:
            records = table(name, self._rows[name])
            before = self._known.tables.get(name)
            if before is not None:
                gone = {key.encode() for key in without}
                # isin() sorts the texts, which takes ten times as long.
                kept = np.array([key not in gone for key in before["run"].tolist()], bool)
                records = np.concatenate([before[kept], records])
            found[name] = records[np.argsort(records["run"], kind="stable")]
        return found


def escaped_path(path: str) -> str:
    """Return a path as valid UTF-8, with escapes for other bytes."""
    return path.encode(errors="backslashreplace").decode()


def _fill(summary: Summary, tables: Mapping[str, NDArray[Any]]) -> None:
    runs = tables["runs"]
    summary.states.update(state.decode() for state in runs["state"].tolist())
    summary.rows = int(runs["rows"].sum())
    paths = dict(zip(runs["run"].tolist(), runs["path"].tolist(), strict=True))
    problems = tables["problems"]
    columns = (problems[name].tolist() for name in ("run", "file", "problem"))
    summary.problems = [
        (paths[key].decode(), name.decode(), what.decode())
        for key, name, what in zip(*columns, strict=True)
    ]


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
