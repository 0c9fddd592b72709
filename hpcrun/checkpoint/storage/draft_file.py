"""A checkpoint file during writing: it hashes the bytes and reports write failures at the end.

``torch.save`` writes through C++ code, which turns an exception of a Python stream into another exception or
aborts the process, and hides the full disk. ``DraftFile`` therefore stores the first failure, only counts the
bytes after it (the count is the space that the file would have needed), and raises when the file is finished.

A lease is a file in the checkpoint folder; flock(2) is missing on Lustre (by default) and on old NFS. The
name contains the expiry time, so that a killed reader does not block pruning forever.
"""

import contextlib
import errno
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from hpcrun.checkpoint.storage.disk import LOCAL, FileSystem
from hpcrun.checkpoint.storage.errors import CheckpointError, amount, is_space, parent_of, reason
from hpcrun.checkpoint.storage.manifest import FileRecord

_BUFFER = 1 << 20
_SECTOR = 4096


class DraftFile:
    """A write-only binary file; after :meth:`finish`, ``record`` holds its size and hash."""

    def __init__(
        self, fs: FileSystem, path: Path, descriptor: int, *, direct: bool = False
    ) -> None:
        """Take over ``descriptor``. ``direct``: it bypasses the page cache where size and address allow."""
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
        """Write all of ``data``. Never raises a disk error; see the module's docstring."""
        view = memoryview(data).cast("B")
        self._offered += len(view)
        if self._failure is None:
            self._hash.update(view)
            # A copy would not have the alignment that direct writes need.
            pooled = len(view) < _BUFFER and not self._direct
            if pooled:
                self._pending += view
            if not pooled or len(self._pending) >= _BUFFER:
                self._drain()
            if not pooled:
                self._put(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: only :meth:`finish` makes data durable."""

    def finish(self) -> None:
        """Write the buffered bytes, fsync, and close.

        Raises:
            CheckpointError: a write, the fsync or the close failed. On a full disk, the text gives the
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
        """Close without a record, so that no commit can include the file."""
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
            # Open the file again: clearing the flag with fcntl(2) does not reach the server of a network
            # file system. Forget the descriptor even if close(2) fails: a second close could close a file
            # that another thread has just opened.
            self._direct = False
            descriptor, self._descriptor = self._descriptor, -1
            self._fs.close(descriptor)
            self._descriptor = self._fs.append(self._path)
        return self._fs.write(self._descriptor, view)

    def _close(self) -> None:
        if self._descriptor < 0:
            return  # the second open failed, and its error is stored
        try:
            self._fs.close(self._descriptor)
        except OSError as error:
            self._failure = self._failure or error

    def _explain(self, error: OSError) -> str:
        text = f"{self._path}: cannot be written: {reason(error)}"
        if not is_space(error):
            return text
        text += (
            f"; the file needs {amount(self._offered)}, of which {amount(self._taken)} were written"
        )
        with contextlib.suppress(OSError):
            text += f", {amount(self._fs.free(parent_of(self._path)))} are free now"
        return text + "; free some space, or lower checkpoint.keep"


LEASE = 3600.0
"""Seconds. Longer than a read takes, and longer than the clocks of a cluster differ."""

_HOLD = re.compile(r"\.held-(\d{9,})-(\d+)-[A-Za-z0-9._-]+")


@contextmanager
def hold(root: Path, step: int, fs: FileSystem = LOCAL) -> Iterator[None]:
    """Protect ``step`` from pruning during the block, for at most an hour.

    A reader without write permission gets no lease, and reads anyway.
    """
    until = int(time.time() + LEASE)
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    name = f".held-{step:09d}-{until}-{host}-{os.getpid()}-{secrets.token_hex(4)}"
    made = False
    with suppress(OSError):
        fs.close(fs.create(root / name))
        made = True
    try:
        yield
    finally:
        if made:
            with suppress(OSError):
                fs.unlink(root / name)


def held(names: Iterable[str]) -> set[int]:
    """Return the steps with a valid lease among these file names."""
    now = time.time()
    found = (_HOLD.fullmatch(name) for name in names)
    return {int(match[1]) for match in found if match and int(match[2]) > now}


def expired(names: Iterable[str]) -> list[str]:
    """Return the names of expired leases; the margin allows for clocks that differ."""
    now = time.time()
    found = ((name, _HOLD.fullmatch(name)) for name in names)
    return [name for name, match in found if match and int(match[2]) + LEASE < now]
