"""A lock in a file, for file systems without flock(2)."""

import contextlib
import json
import os
import signal
import socket
import threading
from pathlib import Path

from hpcrun.run.directory import RunError
from hpcrun.run.io.files import read_json


class LockFile:
    """A lock that one process at a time holds, on every kind of file system.

    The file is made with O_EXCL (atomic on NFS v3 and later, open(2)), not flock, which Lustre and
    old NFS do not have. Its holder touches it every few seconds. A process takes over the lock of a dead
    process of this host, and a lock that was not touched for three minutes. All times are the file
    server's: its clock and this host's may differ by minutes.
    """

    # Longer than a few beats and the minute for which an NFS client may show an old time (acregmax).
    _stale_after = 180.0
    _beat = 10.0

    def __init__(self, path: Path, busy: str) -> None:
        """Prepare the lock ``path``; ``busy`` is the refusal while another process holds it."""
        self._path, self._busy = path, busy
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
        """Put our lock in the place of a stale one; exactly one of several that try succeeds.

        The name of the new file holds the token of the stale lock: only one process can make it, and
        only the process that made it may replace that lock. A process that died in between has left that
        file, which is then taken over in the same way.
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
            # Again, now that nobody else may replace it: the first answer may be old.
            token, age, dead = _holder(lock, now=claim.stat().st_mtime)
            if token != stale or not (dead or age > self._stale_after):
                return False
            claim.replace(lock)
        finally:
            claim.unlink(missing_ok=True)
        return True

    def _write(self, path: Path) -> None:
        """Make ``path`` with our name in it; raises FileExistsError where it is there."""
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "token": self._token}
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w") as stream:  # noqa: PTH123
                json.dump(holder, stream)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def _keep_alive(self) -> None:
        while not self._released.wait(self._beat):
            # A file server that is away for a moment is asked again at the next beat.
            with contextlib.suppress(OSError):
                # Without times, utime(2) leaves them to the file server.
                os.utime(self._path)


def _holder(lock: Path, now: float = 0.0) -> tuple[str | None, float, bool]:
    """A lock's token, its age in seconds at the server's time ``now``, and whether its holder is dead.

    The token is None where there is no lock. A lock whose holder died before it wrote its name goes by
    its inode.
    """
    try:
        found = lock.stat()
    except FileNotFoundError:
        return None, 0.0, False
    holder = read_json(lock) or {}
    here = holder.get("host") == socket.gethostname()
    dead = here and not os.path.exists(f"/proc/{holder.get('pid')}")  # noqa: PTH110
    return str(holder.get("token", found.st_ino)), now - found.st_mtime, dead


def _start_without_signals(thread: threading.Thread) -> None:
    """Start ``thread`` so that signals reach the main thread only, which may make them wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
