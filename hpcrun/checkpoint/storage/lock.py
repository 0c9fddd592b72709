"""One training at a time saves into a folder: a lock that ends with its process, however it ends.

Two would sweep each other's drafts, and the second to reach a step would have its state dropped for the
first one's. A run directory has its owner for that; a bare folder has this.
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

from hpcrun.checkpoint.sharded.fork_safety import close_in_children
from hpcrun.checkpoint.storage.errors import CheckpointError, CheckpointWarning, explained

LOCK = ".lock"

# flock(2), and what Lustre without its mount option and NFS without its daemon answer.
_NONE_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


_holders: "weakref.WeakValueDictionary[Path, FolderLock]" = weakref.WeakValueDictionary()
"""Who in this process has a folder's lock."""


class FolderLock:
    """The lock of ``folder``, not taken yet."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._descriptor = -1
        self._firm = False

    def take(self, here: float = 3.0, elsewhere: float = 120.0) -> None:
        """Take it, unless it is taken here already. Where the file system has no locks, nothing happens.

        Another of this process that has not held it for a save may lose it to this one: one that was made
        anew, as in a notebook, is the one that counts.

        Args:
            here: seconds for another process of this host to end, as an attempt before may just be doing.
            elsewhere: for one of another host: if that died, its server drops the lock later (NFSv4: 90 s).

        Raises:
            CheckpointError: another process has it, or this one for another ``Checkpointer``.
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
        close_in_children(self)

    def hold(self) -> None:
        """As :meth:`take`, and lose it to nobody; raises CheckpointError."""
        self.take()
        self._firm = True

    def close(self) -> None:
        """Give it back."""
        self._firm = False
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()  # of a Checkpointer that failed to be made

    def _lock(self, descriptor: int, here: float, elsewhere: float) -> None:
        began, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                who = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
                other = _holders.get(self._path)
                if other is not None and other._descriptor >= 0:
                    raise CheckpointError(
                        f"{self._path.parent}: another Checkpointer of this process saves there; give each "
                        "its own folder, or leave the other's block first"
                    ) from None
                near = not who or who.endswith(f" on {socket.gethostname()}")
                if not near and not told:
                    text = f"{self._path.parent}: waiting {elsewhere:g} s for another training there ({who})"
                    warnings.warn(text, CheckpointWarning, stacklevel=2)
                    told = True
                if time.monotonic() > began + (here if near else elsewhere):
                    raise CheckpointError(
                        f"{self._path.parent}: another training saves there ({who or 'unknown'}); give each "
                        f"its own folder, end the other, or give every=0, to read only; if its node is "
                        f"gone, remove {self._path}"
                    ) from None
            except OSError as error:
                if error.errno in _NONE_HERE:
                    return
                raise
            time.sleep(0.1)
        with contextlib.suppress(OSError):  # a full disk; the name is only for people
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _name().encode(), 0)


def _name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
