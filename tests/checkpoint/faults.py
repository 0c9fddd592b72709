"""File systems with faults, and small checkpoints of plain bytes for them."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

from hpcrun.storage.disk import FileSystem
from hpcrun.storage.store import CheckpointStore

CALLS = tuple(
    name for name, kind in vars(FileSystem).items() if not name.startswith("_") and callable(kind)
)
OPENING = ("create", "create_direct", "append", "open", "open_directory")


class Watched(FileSystem):
    """Lists its calls in ``trace``, and calls ``before`` with the number of each call, from 1."""

    def __init__(self, before: Callable[[int], None] = lambda _: None) -> None:
        self.trace: list[tuple[str, str]] = []
        self._before = before
        self._open: dict[int, str] = {}

    def __getattribute__(self, name):
        method = super().__getattribute__(name)
        if name not in CALLS:
            return method

        def call(*arguments):
            first = arguments[0]
            if isinstance(first, Path):
                subject = " -> ".join(part.name for part in arguments if isinstance(part, Path))
            else:
                subject = self._open[first]
            self.trace.append((name, subject))
            self._before(len(self.trace))
            result = method(*arguments)
            if name in OPENING:
                self._open[result] = first.name
            return result

        return call


def failing_at(number: int, code: int) -> Watched:
    """A file system: call ``number`` fails with ``code`` and has no effect."""

    def fail(count: int) -> None:
        if count == number:
            raise OSError(code, os.strerror(code))

    return Watched(before=fail)


def failing_from(number: int, code: int) -> Watched:
    """A file system that is gone: every call from ``number`` fails with ``code``."""

    def fail(count: int) -> None:
        if count >= number:
            raise OSError(code, os.strerror(code))

    return Watched(before=fail)


def deadly(number: int) -> Watched:
    """A file system that kills the process right before call ``number``.

    A kill after a call equals a kill before the next call, because nothing else uses the disk in between.
    """

    def kill(count: int) -> None:
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return Watched(before=kill)


class TornWrite(FileSystem):
    """Writes half of the data of write ``number`` and kills the process."""

    def __init__(self, number: int) -> None:
        self._left = number

    def write(self, descriptor: int, data: memoryview) -> int:
        self._left -= 1
        if self._left == 0:
            # Whole sectors if there are any: a direct write of less is refused, not torn.
            half = len(data) // 2
            super().write(descriptor, data[: half // 4096 * 4096 or half])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(descriptor, data)


class Broken(FileSystem):
    """Fails the call ``name`` on files or folders with ``part`` in their paths."""

    def __init__(self, name: str, part: str = "", code: int = errno.EIO) -> None:
        self._fault = (name, part, code)
        self._paths: dict[int, Path] = {}

    def __getattribute__(self, name):
        method = super().__getattribute__(name)
        if name not in CALLS:
            return method

        def call(subject, *more):
            broken, part, code = self._fault
            path = subject if isinstance(subject, Path) else self._paths[subject]
            if name == broken and part in str(path):
                raise OSError(code, os.strerror(code))
            result = method(subject, *more)
            if name in OPENING:
                self._paths[result] = path
            return result

        return call


class Flipping(FileSystem):
    """Flips a bit of each read from files with ``part`` in their names, like bad memory.

    ``once``: only the first of these reads is wrong.
    """

    def __init__(self, part: str, *, once: bool = False) -> None:
        self._part, self._once = part, once
        self._bad: set[int] = set()

    def open(self, path):
        descriptor = super().open(path)
        if self._part in path.name:
            self._bad.add(descriptor)
        return descriptor

    def read_into(self, descriptor, view, position):
        count = super().read_into(descriptor, view, position)
        if count and descriptor in self._bad:
            view[0] ^= 1
            if self._once:
                self._part = "no other"
                self._bad.clear()
        return count

    def close(self, descriptor):
        self._bad.discard(descriptor)
        super().close(descriptor)


class Stale(FileSystem):
    """An NFS server that has lost its handles: the next ``left`` uses of an open file are refused.

    Only files and folders with ``part`` in their paths are concerned. Each use of a folder counts too.
    """

    def __init__(self, part: str, left: int) -> None:
        self._part, self.left = part, left
        self._paths: dict[int, str] = {}

    def open(self, path):
        descriptor = super().open(path)
        self._paths[descriptor] = str(path)
        return descriptor

    def names(self, path):
        self._use(str(path))
        return super().names(path)

    def size(self, descriptor):
        self._use(self._paths[descriptor])
        return super().size(descriptor)

    def read_into(self, descriptor, view, position):
        self._use(self._paths[descriptor])
        # Short reads, so that a handle is also lost in the middle of a file.
        return super().read_into(descriptor, view[:30_000], position)

    def _use(self, path: str) -> None:
        if self.left and self._part in path:
            self.left -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def content(step: int) -> dict[str, bytes]:
    """Return two files that differ from step to step; the second is longer than the write buffer."""
    seed = step.to_bytes(4, "little")
    return {"shared.pt": seed * 25, "rank-00000.pt": seed * (300_000)}


def save(store: CheckpointStore, step: int, still_mine: Callable[[], None] = lambda: None) -> Path:
    """Save a step, with the calls of a writer."""
    draft = store.begin(step)
    records = []
    for name, data in content(step).items():
        with store.open_file(draft, name) as stream:
            stream.write(data[:10])
            stream.write(data[10:])
        records.append(stream.record)
    return store.commit(draft, step, records, 1, {"step": step}, still_mine)


def die_in_a_child(work: Callable[[Callable[[], None]], None]) -> tuple[bool, bool]:
    """Run ``work`` in a child; return if the child was killed, and if it announced its commit."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(lambda: os.write(writer, b"!") and None)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        announced = pipe.read() == b"!"
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, announced
