"""A copy of a file, made by a thread while the caller does other work."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from threading import Event, Thread

# Older kernels and some file systems cannot copy a range.
_NOT_BETWEEN_THESE = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF)
# Bytes that are copied and written to the disk before the next ones.
_PART = 1 << 26
_READ = 1 << 22


class FileCopy:
    """The copy of a file. If the file system supports it, the copy shares the blocks, which takes no time.

    The thread also writes the bytes to the disk, so that a later fsync has less to do.
    """

    def __init__(self, source: Path, target: Path) -> None:
        """Begin to copy ``source`` to the new file ``target``."""
        self._source, self._target = source, target
        self._stop = Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name=f"copy of {source.name}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """True while the copy is incomplete."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the copy is complete; raises OSError if the disk refused."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop the copy, incomplete or not, and wait for the end of the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._copy()
        except BaseException as error:
            self._error = error

    def _copy(self) -> None:
        with self._source.open("rb") as old, self._target.open("wb") as new:
            left = os.fstat(old.fileno()).st_size
            try:
                while left and not self._stop.is_set():
                    done = os.copy_file_range(old.fileno(), new.fileno(), min(left, _PART))
                    if not done:
                        break
                    left -= done
                    os.fdatasync(new.fileno())
            except OSError as error:
                if error.errno not in _NOT_BETWEEN_THESE:
                    raise
            # A file system may report the end too early.
            while not self._stop.is_set() and (block := old.read(_READ)):
                new.write(block)
