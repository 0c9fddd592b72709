"""The system calls of the store, one method each. Tests inject faults here.

A test subclasses :class:`FileSystem` and fails, or kills the process, at the n-th call. The store accesses
the disk only through this class, so the number of calls is the number of crash points.
"""

import errno
import os
import stat
from pathlib import Path


class FileSystem:
    """Calls on the local system; new files are private to the owner. Every method raises ``OSError``."""

    direct_from = 4 << 20
    """Bytes from which a file of a rank is written past the page cache."""

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


LOCAL = FileSystem()
