"""A lock in a file, for file systems without flock(2)."""

import contextlib
import json
import os
import signal
import threading
from pathlib import Path

from hpcrun.drafts import process_space, runs
from hpcrun.run.directory import RunError
from hpcrun.run.io.files import read_json


class LockFile:
    """A lock for one process at a time, on every kind of file system.

    The file is created with O_EXCL (atomic on NFS v3 and later, open(2)); flock is missing on Lustre and old
    NFS. The holder touches the file every few seconds. A process takes over the lock of a dead process of
    this host and container, and a lock that was not touched for three minutes. All times are from the file
    server, because its clock and this host's may differ by minutes.
    """

    # Longer than a few touches, and than the minute for which an NFS client may show an old time (acregmax).
    _stale_after = 180.0

    def __init__(self, path: Path, busy: str, *, beat: float = 10.0) -> None:
        """Prepare the lock.

        Args:
            path: the file.
            busy: the refusal while another process holds the lock.
            beat: seconds between two touches.
        """
        self._path, self._busy, self._beat = path, busy, beat
        self._token = os.urandom(8).hex()
        self._released = threading.Event()

    def __enter__(self) -> None:
        if not self._created() and not self._taken_over():
            raise RunError(self._busy)
        _start_without_signals(threading.Thread(target=self._keep_alive, daemon=True))

    def __exit__(self, *_: object) -> None:
        self._released.set()
        if _holder(self._path)[0] == self._token:
            self._path.unlink(missing_ok=True)

    def _created(self) -> bool:
        try:
            self._write(self._path)
        except FileExistsError:
            return False
        except OSError as error:
            raise RunError(
                f"{self._path.parent}: cannot be written: {error.strerror}; check its owner and space"
            ) from error
        return True

    def _taken_over(self, lock: Path | None = None) -> bool:
        """Replace a stale lock by this process's lock; of several processes exactly one succeeds.

        The name of the new file contains the token of the stale lock: only one process can create the file,
        and only this process may replace the lock. If the process died in between, its file is a stale lock
        too, and is taken over in the same way.
        """
        lock = lock or self._path
        stale, _, _ = _holder(lock)
        if stale is None:
            return lock == self._path and self._created()
        claim = lock.with_name(f".{self._path.name}.{stale}")
        try:
            self._write(claim)
        except FileExistsError:
            if not self._taken_over(claim):
                return False
        try:
            # Read again, now that no other process can replace the lock: the first answer may be old.
            token, age, dead = _holder(lock, now=claim.stat().st_mtime)
            replaceable = token == stale and (dead or age > self._stale_after)
            if replaceable:
                claim.replace(lock)
        except BaseException:
            claim.unlink(missing_ok=True)
            raise
        # After the rename, a file of this name is the claim of another process.
        if not replaceable:
            claim.unlink(missing_ok=True)
        return replaceable

    def _write(self, path: Path) -> None:
        """Create ``path`` with this process's name; raises FileExistsError if it exists."""
        holder = {"pid": os.getpid(), "space": process_space(), "token": self._token}
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w") as stream:  # noqa: PTH123
                json.dump(holder, stream)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def _keep_alive(self) -> None:
        while not self._released.wait(self._beat):
            # If the file server does not answer, the next touch follows in a few seconds.
            with contextlib.suppress(OSError):
                # Without times, utime(2) uses the clock of the file server.
                os.utime(self._path)


def _holder(lock: Path, now: float = 0.0) -> tuple[str | None, float, bool]:
    """Return a lock's token, its age in seconds at the server's time ``now``, and if its holder is dead.

    The token is None if there is no lock. If the holder died before it wrote its name, the token is
    the inode.
    """
    try:
        found = lock.stat()
    except FileNotFoundError:
        return None, 0.0, False
    holder = read_json(lock) or {}
    here = holder.get("space") == process_space()
    dead = here and not runs(int(holder["pid"]))
    return str(holder.get("token", found.st_ino)), now - found.st_mtime, dead


def _start_without_signals(thread: threading.Thread) -> None:
    """Start ``thread`` with blocked signals: only the main thread gets them, and may defer them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
