"""Disk operations of more than one system call: durable names, retried opens, removal.

A test subclasses :class:`FileSystem` and fails, or kills the process, at the n-th call. The store accesses
the disk only through this class, so the number of calls is the number of crash points.
"""

import ctypes
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

from hpcrun.storage.errors import vanished

Result = TypeVar("Result")


class FileSystem:
    """Calls on the local system; new files are private to the owner. Every method raises ``OSError``."""

    direct_from = 4 << 20
    """Bytes from which a file of a rank is written past the page cache."""

    striped_from = 1_000_000_000
    """Bytes from which several stripes of a parallel file system make a file faster."""

    def make_directory(self, path: Path) -> None:
        """Create a folder with mkdir(2); fails if ``path`` exists."""
        path.mkdir(mode=0o700)

    def create(self, path: Path) -> int:
        """Create a new file, and return a descriptor for writing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, 0o600)

    def create_direct(self, path: Path) -> int:
        """Create a file as :meth:`create`, with O_DIRECT; EINVAL if the file system does not support it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECT
        return os.open(path, flags, 0o600)

    def append(self, path: Path) -> int:
        """Open an existing file to append through the page cache, and return the descriptor."""
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write ``data``, and return the number of written bytes, which may be smaller (write(2))."""
        return os.write(descriptor, data)

    def open(self, path: Path) -> int:
        """Open a regular file for reading, and return the descriptor.

        A symbolic link is refused because it could lead out of the folder. Other file types are refused as
        well: a reader of a named pipe would wait forever.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file")
        return descriptor

    def open_directory(self, path: Path) -> int:
        """Open a folder, and return a descriptor to fsync its names."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def read_into(self, descriptor: int, view: memoryview, position: int) -> int:
        """Read from ``position`` into ``view`` (preadv(2)); return the number of bytes, 0 at the end."""
        return os.preadv(descriptor, [view], position)

    def drop_cache(self, descriptor: int) -> None:
        """Drop a file from the page cache (posix_fadvise(2)), so that the next read comes from the disk.

        The kernel may ignore the request.
        """
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def size(self, descriptor: int) -> int:
        """Return the size of the open file in bytes. Not stat(2): NFS answers it from a cache."""
        return os.fstat(descriptor).st_size

    def fsync(self, descriptor: int) -> None:
        """Make the file durable. Never repeat a failed call: the kernel has dropped the pages."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close the descriptor. close(2) reports late write errors on network file systems."""
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename with rename(2): a folder replaces only an empty folder."""
        source.rename(target)

    def names(self, path: Path) -> list[str]:
        """Return the sorted names in a folder."""
        return sorted(entry.name for entry in path.iterdir())

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def free(self, path: Path) -> int:
        """Return the bytes that an ordinary user may still write there (without quotas)."""
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize

    def type_of(self, path: Path) -> int:
        """Return the type of the file system of ``path``: ``f_type`` of statfs(2), its first field."""
        found = ctypes.create_string_buffer(_STATFS)
        library = ctypes.CDLL(None, use_errno=True)
        if library.statfs(os.fsencode(path), found):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return ctypes.c_uint.from_buffer(found).value


# More than the 120 bytes of the structure. Its first field is a word; a type has 32 bits.
_STATFS = 512


LOCAL = FileSystem()


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


def with_retries(call: Callable[[], int], patience: float) -> int:
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


def again_if_stale(call: Callable[[], Result]) -> Result:
    """Return ``call()``; call it a second time if a handle is stale (ESTALE).

    An NFS server that was restarted, or has failed over, may lose its handles; a new look-up of the path
    gets a new one (nfs(5)).

    Args:
        call: opens what it reads by its path.

    Raises:
        OSError: any other error, or the handle is stale again.
    """
    try:
        return call()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return call()


class OpenFile:
    """A file for reading at any position. Close it after use.

    A stale handle is opened again once in each call.
    """

    def __init__(self, fs: FileSystem, path: Path, patience: float) -> None:
        """Open the file; wait up to ``patience`` seconds for its name. Raises OSError."""
        self._fs, self._path, self._patience = fs, path, patience
        self._descriptor = -1
        self._open()

    def size(self) -> int:
        """Return the size in bytes; raises OSError."""
        return self._with_handle(self._fs.size)

    def read(self, position: int, view: memoryview) -> int:
        """Read from ``position`` into ``view``; return the number of bytes, 0 at the end. Raises OSError."""
        return self._with_handle(lambda handle: self._fs.read_into(handle, view, position))

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

    def _open(self) -> None:
        self._descriptor = with_retries(lambda: self._fs.open(self._path), self._patience)

    def _with_handle(self, call: Callable[[int], int]) -> int:
        def once() -> int:
            if self._descriptor < 0:
                self._open()
            try:
                return call(self._descriptor)
            except OSError as error:
                if error.errno == errno.ESTALE:
                    stale, self._descriptor = self._descriptor, -1
                    # close(2) may report the stale handle too.
                    with suppress(OSError):
                        self._fs.close(stale)
                raise

        return again_if_stale(once)


def blocks(fs: FileSystem, path: Path, limit: int, patience: float) -> Iterator[memoryview]:
    """Yield the first ``limit`` bytes of a file (fewer if it is shorter) in blocks; raises OSError."""
    with closing(OpenFile(fs, path, patience)) as file:
        done = 0
        while done < limit:
            view = memoryview(bytearray(min(limit - done, BLOCK)))
            count = file.read(done, view)
            if count == 0:
                return
            done += count
            yield view[:count]


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
