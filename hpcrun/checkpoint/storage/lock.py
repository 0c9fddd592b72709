"""A lock on a checkpoint folder: only one training run may save there. It ends with its process.

Two training runs would delete each other's temporary folders, and the state of the second run to reach a
step would be dropped in favor of the first run's. A run directory has its owner record for this purpose; a
bare checkpoint folder has this lock.
"""

import contextlib
import errno
import fcntl
import os
import socket
import time
import warnings
import weakref
from pathlib import Path

from hpcrun.checkpoint.storage.errors import CheckpointError, CheckpointWarning, explained

LOCK = ".lock"

# Answers of flock(2) on Lustre without its mount option, and on NFS without its lock daemon.
_NONE_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


_holders: "weakref.WeakValueDictionary[Path, FolderLock]" = weakref.WeakValueDictionary()
"""The lock objects of this process, by path."""


def _close_all() -> None:
    for lock in list(_holders.values()):
        with contextlib.suppress(OSError):
            lock.close()


# A child, such as a DataLoader worker, inherits the descriptor, and would keep the lock until it ends.
os.register_at_fork(after_in_child=_close_all)


class FolderLock:
    """The lock of ``folder``; initially not taken."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._descriptor = -1
        self._firm = False

    def take(self, here: float = 3.0, elsewhere: float = 120.0) -> None:
        """Take the lock, unless this object has it. Does nothing on a file system without locks.

        A newer Checkpointer of this process takes the lock over unless :meth:`hold` made it firm: in a
        notebook, the newest object counts.

        Args:
            here: seconds to wait for a process on this host, such as a previous attempt that is ending.
            elsewhere: seconds to wait for a process on another host: if that host died, the server drops
                its lock later (NFSv4: after 90 s).

        Raises:
            CheckpointError: another process, or another ``Checkpointer`` of this process, has the lock.
        """
        if self._descriptor >= 0:
            return
        before = _holders.get(self._path)
        if before is not None and not before._firm:
            before.close()
        with explained("be locked", self._path):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o600)
            try:
                self._lock(descriptor, here, elsewhere)
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor = descriptor
        _holders[self._path] = self

    def hold(self) -> None:
        """Take the lock, and keep it against newer objects of this process; raises CheckpointError."""
        self.take()
        self._firm = True

    def close(self) -> None:
        """Release the lock."""
        self._firm = False
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()  # for a Checkpointer after an error in its constructor

    def _lock(self, descriptor: int, here: float, elsewhere: float) -> None:
        began, warned = time.monotonic(), False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                who = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
                other = _holders.get(self._path)
                if other is not None and other._descriptor >= 0:
                    raise CheckpointError(
                        f"{self._path.parent}: another Checkpointer of this process saves there; use "
                        "another folder, or leave the block of the first Checkpointer before"
                    ) from None
                near = not who or who.endswith(f" on {socket.gethostname()}")
                if not near and not warned:
                    text = (
                        f"{self._path.parent}: waiting {elsewhere:g} s for another training run that "
                        f"saves there ({who})"
                    )
                    warnings.warn(text, CheckpointWarning, stacklevel=2)
                    warned = True
                if time.monotonic() > began + (here if near else elsewhere):
                    raise CheckpointError(
                        f"{self._path.parent}: another training run saves there ({who or 'unknown'}); use "
                        f"another folder, end that run, or pass every=0 to read only; if its node is "
                        f"gone, remove {self._path}"
                    ) from None
            except OSError as error:
                if error.errno in _NONE_HERE:
                    return
                raise
            time.sleep(0.1)
        with contextlib.suppress(OSError):  # a full disk; the name is only informative
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _name().encode(), 0)


def _name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
