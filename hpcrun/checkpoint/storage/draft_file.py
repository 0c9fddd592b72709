"""A checkpoint file during writing, which hashes its bytes."""

import errno
from contextlib import suppress
from pathlib import Path

import xxhash

from hpcrun.checkpoint.storage.disk import FileSystem
from hpcrun.checkpoint.storage.errors import CheckpointError, amount, is_space, parent_of, reason
from hpcrun.checkpoint.storage.manifest import FileRecord

_SECTOR = 4096


class DraftFile:
    """A write-only binary file; after :meth:`finish`, ``record`` holds its size and hash."""

    def __init__(
        self, fs: FileSystem, path: Path, descriptor: int, *, direct: bool = False
    ) -> None:
        """Take over ``descriptor``. ``direct``: it bypasses the page cache where size and address allow."""
        self.record: FileRecord | None = None
        self._fs, self._path, self._descriptor = fs, path, descriptor
        self._hash = xxhash.xxh3_128()
        self._size = 0
        self._direct = direct

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of ``data``; raises OSError."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        while view:
            count = self._write(view)
            if count <= 0:
                raise OSError(f"the file system took {count} of {len(view)} bytes")
            self._size += count
            view = view[count:]
        return len(data)

    def finish(self) -> None:
        """Fsync and close; raises OSError."""
        self._fs.fsync(self._descriptor)
        descriptor, self._descriptor = self._descriptor, -1
        self._fs.close(descriptor)
        self.record = FileRecord(self._path.name, self._size, self._hash.hexdigest())

    def discard(self) -> None:
        """Close, unless the file is closed; without a record, no commit can include the file."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._fs.close(self._descriptor)

    def failure(self, error: OSError) -> CheckpointError:
        """Return the exception for ``error``; on a full disk, its text has the written and the free bytes."""
        text = f"{self._path}: cannot be written: {reason(error)}"
        if is_space(error):
            text += f"; {amount(self._size)} were written"
            with suppress(OSError):
                text += f", {amount(self._fs.free(parent_of(self._path)))} are free now"
            text += "; free some space, or lower checkpoint.keep"
        return CheckpointError(text)

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
            # Open the file again: clearing the flag with fcntl(2) does not reach the server of a network
            # file system. Forget the descriptor even if close(2) fails: a second close could close a file
            # that another thread has just opened.
            self._direct = False
            descriptor, self._descriptor = self._descriptor, -1
            self._fs.close(descriptor)
            self._descriptor = self._fs.append(self._path)
        return self._fs.write(self._descriptor, view)
