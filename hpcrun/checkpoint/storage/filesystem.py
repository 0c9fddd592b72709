"""The system calls of the store, one method each: the seam where tests plant faults.

A test subclasses :class:`FileSystem` and fails, or kills the process, at the n-th call; nothing in
the store touches the disk in any other way, so that counting these calls counts every crash point.
"""

import errno
import os
import secrets
import stat
from pathlib import Path


class FileSystem:
    """The local calls, with the owner's permissions alone. Every method raises ``OSError``."""

    def make_directory(self, path: Path) -> None:
        """mkdir(2): fails when ``path`` exists."""
        path.mkdir(mode=0o700)

    def create(self, path: Path) -> int:
        """A descriptor for writing a file that did not exist."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, 0o600)

    def create_direct(self, path: Path) -> int:
        """As :meth:`create`, past the page cache (O_DIRECT); EINVAL where that is not possible."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECT
        return os.open(path, flags, 0o600)

    def create_unnamed(self, folder: Path, direct: bool) -> int:
        """A descriptor for writing and reading a file that no folder lists and no crash leaves behind.

        On a file system that cannot make such a file it loses its name at once; a kill in between
        leaves it empty. ``direct``: past the page cache; EINVAL where that is not possible.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            return os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            # Not every file system can (open(2), O_TMPFILE); NFS is one.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                raise
        path = folder / f".hpcrun-{secrets.token_hex(8)}"
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        finally:
            path.unlink(missing_ok=True)  # some make the file before they refuse the flag

    def append(self, path: Path) -> int:
        """A descriptor for writing on at the end of a file that exists, through the page cache."""
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)

    def write(self, descriptor: int, data: memoryview) -> int:
        """How many bytes of ``data`` were taken, which may be fewer than offered (write(2))."""
        return os.write(descriptor, data)

    def open(self, path: Path) -> int:
        """A descriptor for reading a file; a symbolic link is refused, it could lead out of the folder.

        So is what is no file: a named pipe would have its reader wait for ever.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file")
        return descriptor

    def open_directory(self, path: Path) -> int:
        """A descriptor to fsync the names in ``path`` through."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def read_into(self, descriptor: int, view: memoryview, position: int) -> int:
        """How many bytes from ``position`` on were put into ``view`` (preadv(2)); 0 at the end."""
        return os.preadv(descriptor, [view], position)

    def drop_cache(self, descriptor: int) -> None:
        """Have the next read of a file come from the disk (posix_fadvise(2)); the kernel may refuse."""
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def size(self, descriptor: int) -> int:
        """Bytes in the open file: asked after open(2), because NFS answers stat(2) from a cache."""
        return os.fstat(descriptor).st_size

    def fsync(self, descriptor: int) -> None:
        """Make it durable. Never repeated after a failure: the kernel has dropped the pages by then."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """close(2) reports late write errors on network file systems."""
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """rename(2): a folder replaces nothing but an empty folder."""
        source.rename(target)

    def names(self, path: Path) -> list[str]:
        """What lies in a folder, sorted."""
        return sorted(entry.name for entry in path.iterdir())

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def free(self, path: Path) -> int:
        """Bytes that an ordinary user may still write there (quotas not counted)."""
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize


LOCAL = FileSystem()
