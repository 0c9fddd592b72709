"""A file of a checkpoint while it is written: hashed as the bytes pass, its failures kept for the end.

``torch.save`` writes through C++ that turns an exception of a Python stream into another one, or
into the end of the process, and hides the full disk behind it. So a failing write is remembered, the
bytes after it are only counted (that count is what the file would have needed), and the failure is
raised when the file is finished.
"""

import contextlib
import errno
from pathlib import Path

import xxhash

from hpcrun.checkpoint.storage.errors import CheckpointError, amount, is_space, parent_of, reason
from hpcrun.checkpoint.storage.filesystem import FileSystem
from hpcrun.checkpoint.storage.manifest import FileRecord

_BUFFER = 1 << 20
_SECTOR = 4096


class DraftFile:
    """A write-only binary file; ``record`` holds its size and hash once it is finished."""

    def __init__(
        self, fs: FileSystem, path: Path, descriptor: int, *, direct: bool = False
    ) -> None:
        """``direct``: the descriptor writes past the page cache, as long as what is written allows it."""
        self.record: FileRecord | None = None
        self._fs = fs
        self._path = path
        self._descriptor = descriptor
        self._hash = xxhash.xxh3_128()
        self._offered = 0
        self._taken = 0
        self._pending = bytearray()
        self._failure: OSError | None = None
        self._direct = direct

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Take all of ``data``; never raises for the disk, see the module's docstring."""
        view = memoryview(data).cast("B")
        self._offered += len(view)
        if self._failure is None:
            self._hash.update(view)
            # A copy would not lie where direct writes want it.
            pooled = len(view) < _BUFFER and not self._direct
            if pooled:
                self._pending += view
            if not pooled or len(self._pending) >= _BUFFER:
                self._drain()
            if not pooled:
                self._put(view)
        return len(view)

    def flush(self) -> None:
        """Nothing: what is durable is decided by :meth:`finish` alone."""

    def finish(self) -> None:
        """Write what is left, fsync, close.

        Raises:
            CheckpointError: any write, the fsync or the close failed; where space ran out, with the
                bytes needed, written and free.
        """
        self._drain()
        if self._failure is None:
            try:
                self._fs.fsync(self._descriptor)
            except OSError as error:
                self._failure = error
        self._close()
        self.raise_failure()
        self.record = FileRecord(self._path.name, self._offered, self._hash.hexdigest())

    def discard(self) -> None:
        """Close without finishing: there is no record, and the draft cannot be committed with it."""
        self._close()

    def raise_failure(self) -> None:
        """Raise the first failure as a CheckpointError, if there was one."""
        if self._failure is not None:
            raise CheckpointError(self._explain(self._failure)) from self._failure

    def _drain(self) -> None:
        pending, self._pending = self._pending, bytearray()
        self._put(memoryview(pending))

    def _put(self, view: memoryview) -> None:
        try:
            while view and self._failure is None:
                count = self._write(view)
                if count <= 0:
                    raise OSError(f"the file system took {count} of {len(view)} bytes")
                self._taken += count
                view = view[count:]
        except OSError as error:
            self._failure = error

    def _write(self, view: memoryview) -> int:
        if self._direct:
            whole = len(view) // _SECTOR * _SECTOR
            try:
                if whole:
                    return self._fs.write(self._descriptor, view[:whole])
            except OSError as error:
                # The address or the size does not suit this file system (open(2), O_DIRECT).
                if error.errno != errno.EINVAL:
                    raise
            # Opened anew: to clear the flag (fcntl(2)) does not reach the server of a network file system.
            # Gone even where close(2) fails: to close it again could hit another thread's new file.
            self._direct = False
            descriptor, self._descriptor = self._descriptor, -1
            self._fs.close(descriptor)
            self._descriptor = self._fs.append(self._path)
        return self._fs.write(self._descriptor, view)

    def _close(self) -> None:
        if self._descriptor < 0:
            return  # lost between closing and opening anew, which has failed already
        try:
            self._fs.close(self._descriptor)
        except OSError as error:
            self._failure = self._failure or error

    def _explain(self, error: OSError) -> str:
        text = f"{self._path}: cannot be written: {reason(error)}"
        if not is_space(error):
            return text
        text += f"; it needs {amount(self._offered)}, {amount(self._taken)} of it went in"
        with contextlib.suppress(OSError):
            text += f", {amount(self._fs.free(parent_of(self._path)))} are free now"
        return text + "; free some space, or lower checkpoint.keep"
