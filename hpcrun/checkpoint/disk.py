"""What the store does to a disk in more than one call: durable names, patient opens, removal.

Apart from the protocol, so that the protocol reads as one.
"""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from hpcrun.checkpoint.errors import CheckpointError, explained, vanished
from hpcrun.checkpoint.filesystem import FileSystem

BLOCK = 1 << 20


def sync_directory(fs: FileSystem, folder: Path) -> None:
    """Make the names in ``folder`` durable; raises OSError."""
    descriptor = fs.open_directory(folder)
    try:
        fs.fsync(descriptor)
    finally:
        fs.close(descriptor)


def patiently(call: Callable[[], int], patience: float) -> int:
    """What ``call`` returns, tried again for ``patience`` seconds while a name is not there (yet).

    Raises:
        OSError: the last one, or at once any that waiting does not mend.
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


def blocks(fs: FileSystem, path: Path, limit: int, patience: float) -> Iterator[bytes]:
    """The first ``limit`` bytes of a file, or all if it is shorter, in pieces; raises OSError."""
    descriptor = patiently(lambda: fs.open(path), patience)
    try:
        while limit > 0 and (block := fs.read(descriptor, min(limit, BLOCK))):
            limit -= len(block)
            yield block
    finally:
        fs.close(descriptor)


class PatientFile:
    """A file to read pieces of. Close it.

    A handle that goes stale (an NFS server that was restarted) is opened again, within ``patience``.
    """

    def __init__(self, fs: FileSystem, path: Path, patience: float) -> None:
        """Raises OSError."""
        self._fs, self._path, self._patience = fs, path, patience
        self._descriptor = self._open()

    def fill(self, position: int, view: memoryview, block: int) -> Iterator[memoryview]:
        """Read from ``position`` on into ``view``, and yield each ``block`` bytes of it when filled.

        Raises:
            OSError: it cannot be read.
            EOFError: it ends before ``view`` is full.
        """
        deadline = time.monotonic() + self._patience
        for start in range(0, len(view), block):
            part = view[start : start + block]
            done = 0
            while done < len(part):
                try:
                    count = self._fs.read_into(
                        self._descriptor, part[done:], position + start + done
                    )
                except OSError as error:
                    if error.errno != errno.ESTALE or time.monotonic() > deadline:
                        raise
                    self._reopen()
                    continue
                if count == 0:
                    raise EOFError
                done += count
            yield part

    def close(self) -> None:
        """Raises OSError."""
        if self._descriptor >= 0:
            self._fs.close(self._descriptor)

    def _open(self) -> int:
        return patiently(lambda: self._fs.open(self._path), self._patience)

    def _reopen(self) -> None:
        stale, self._descriptor = self._descriptor, -1
        self._fs.close(stale)
        self._descriptor = self._open()


def require_size(fs: FileSystem, path: Path, size: int, patience: float) -> None:
    """Raise CheckpointError unless ``path`` is a file of ``size`` bytes."""
    with explained("be read", path):
        descriptor = patiently(lambda: fs.open(path), patience)
        try:
            found = fs.size(descriptor)
        finally:
            fs.close(descriptor)
    if found != size:
        raise CheckpointError(f"{path}: is {found} bytes long, {size} were written")


def delete(fs: FileSystem, path: Path) -> None:
    """Remove ``path`` with what is in it, following no link; what is gone already is gone.

    Raises:
        OSError: something stays.
    """
    try:
        fs.unlink(path)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        # Another incarnation may be sweeping the same folder.
        with suppress(FileNotFoundError):
            for name in fs.names(path):
                delete(fs, path / name)
            fs.remove_directory(path)
