"""Disk operations of more than one system call: durable names, retried opens, removal."""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from hpcrun.checkpoint.storage.errors import CheckpointError, explained, vanished
from hpcrun.checkpoint.storage.filesystem import FileSystem

BLOCK = 1 << 20


def sync_directory(fs: FileSystem, folder: Path) -> None:
    """Make the names in ``folder`` durable with fsync(2); raises OSError."""
    descriptor = fs.open_directory(folder)
    try:
        fs.fsync(descriptor)
    finally:
        fs.close(descriptor)


def make_directories(fs: FileSystem, folder: Path) -> None:
    """Create ``folder`` and its missing parents durably; raises OSError."""
    try:
        fs.make_directory(folder)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_directories(fs, folder.parent)
        with suppress(FileExistsError):  # another process was faster
            fs.make_directory(folder)
    sync_directory(fs, folder.parent)


def patiently(call: Callable[[], int], patience: float) -> int:
    """Return ``call()``; repeat it for ``patience`` seconds while a name does not exist (yet).

    Raises:
        OSError: the last error, or immediately any error that a retry cannot fix.
    """
    deadline = time.monotonic() + patience
    pause = 0.01
    while True:
        try:
            return call()
        except OSError as error:
            if not vanished(error) or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause *= 2


class RetryingFile:
    """A file for reading at any position. Close it after use.

    A stale handle (the NFS server was restarted) is opened again, within ``patience`` seconds.
    """

    def __init__(self, fs: FileSystem, path: Path, patience: float) -> None:
        """Open the file; raises OSError."""
        self._fs, self._path, self._patience = fs, path, patience
        self._descriptor = patiently(lambda: fs.open(path), patience)

    def size(self) -> int:
        """Return the size in bytes; raises OSError."""
        return self._patiently(self._fs.size)

    def read(self, position: int, view: memoryview) -> int:
        """Read from ``position`` into ``view``; return the number of bytes, 0 at the end. Raises OSError."""
        return self._patiently(lambda descriptor: self._fs.read_into(descriptor, view, position))

    def fill(self, position: int, view: memoryview, block: int) -> Iterator[memoryview]:
        """Read from ``position`` into ``view``, and yield each filled block of ``block`` bytes.

        Raises:
            OSError: the file cannot be read.
            EOFError: the file ends before ``view`` is full.
        """
        for start in range(0, len(view), block):
            part = view[start : start + block]
            done = 0
            while done < len(part):
                count = self.read(position + start + done, part[done:])
                if count == 0:
                    raise EOFError
                done += count
            yield part

    def close(self) -> None:
        """Close the descriptor; raises OSError."""
        if self._descriptor >= 0:
            self._fs.close(self._descriptor)

    def _patiently(self, call: Callable[[int], int]) -> int:
        def once() -> int:
            if self._descriptor < 0:
                self._descriptor = self._fs.open(self._path)
            try:
                return call(self._descriptor)
            except OSError as error:
                if error.errno == errno.ESTALE:
                    stale, self._descriptor = self._descriptor, -1
                    with suppress(OSError):
                        self._fs.close(stale)
                raise

        return patiently(once, self._patience)


def blocks(fs: FileSystem, path: Path, limit: int, patience: float) -> Iterator[memoryview]:
    """Yield the first ``limit`` bytes of a file (fewer if it is shorter) in blocks; raises OSError."""
    with closing(RetryingFile(fs, path, patience)) as file:
        done = 0
        while done < limit:
            view = memoryview(bytearray(min(limit - done, BLOCK)))
            count = file.read(done, view)
            if count == 0:
                return
            done += count
            yield view[:count]


def require_size(fs: FileSystem, path: Path, size: int, patience: float) -> None:
    """Raise CheckpointError unless ``path`` is a file of ``size`` bytes."""
    with explained("be read", path), closing(RetryingFile(fs, path, patience)) as file:
        found = file.size()
    if found != size:
        raise CheckpointError(f"{path}: has {found} bytes, but {size} were written")


def delete(fs: FileSystem, path: Path) -> None:
    """Remove ``path`` and its content without following links; a missing path is no error.

    Raises:
        OSError: the path cannot be removed.
    """
    try:
        fs.unlink(path)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        # Another attempt may remove the same folder at the same time.
        with suppress(FileNotFoundError):
            for name in fs.names(path):
                delete(fs, path / name)
            fs.remove_directory(path)
