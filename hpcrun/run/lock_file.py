"""A lock in a file, for every file system: flock(2) is missing on Lustre (by default) and on old NFS."""

import contextlib
import json
import os
import re
import signal
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hpcrun.drafts import draft_of, process_space, remove_left, runs
from hpcrun.errors import UserError
from hpcrun.run.attempt import attempt_here
from hpcrun.run.directory import RunError
from hpcrun.run.files import read_json

_objects: "weakref.WeakValueDictionary[str, LockFile]" = weakref.WeakValueDictionary()
"""The lock objects of this process, by token."""


class LockFile:
    """A lock for one process at a time.

    The file appears with its content: link(2) gives a private file its name, if no file has this name. The
    holder touches the file every few seconds. A process takes over a damaged lock, the lock of a dead process
    of this host and container, of an earlier start of its Slurm job, and a lock that was not touched for
    three minutes. All times are from the file server, because its clock may differ from this host's.
    """

    # Longer than a few touches, and than the minute for which an NFS client may show an old time (acregmax).
    _stale_after = 180.0

    def __init__(
        self, path: Path, busy: str, *, beat: float = 10.0, error: type[UserError] = RunError
    ) -> None:
        """Prepare the lock.

        Args:
            path: the file.
            busy: the refusal while another process holds the lock; ``{holder}`` becomes the process.
            beat: seconds between two touches.
            error: class of the refusal.
        """
        self._path, self._busy, self._beat, self._error = path, busy, beat, error
        self._token = os.urandom(8).hex()
        self._firm = False
        self._release: Callable[[], object] = lambda: None
        _objects[self._token] = self

    def __enter__(self) -> None:
        self.hold()

    def __exit__(self, *_: object) -> None:
        self.release()

    def hold(self, here: float = 0.0, elsewhere: float = 0.0) -> None:
        """Take the lock as :meth:`take`, and keep it against newer objects of this process."""
        before, self._firm = self._firm, True
        try:
            self.take(here, elsewhere)
        except BaseException:
            self._firm = before
            raise

    def take(
        self,
        here: float = 0.0,
        elsewhere: float = 0.0,
        waiting: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Take the lock, unless this object has it.

        A newer object of this process takes the lock over unless :meth:`hold` made it firm: in a notebook,
        the newest object counts.

        Args:
            here: seconds to wait for a process of this host and container, which may be ending.
            elsewhere: seconds to wait for a process of another host or container.
            waiting: called once with the name of such a process before a wait.

        Raises:
            UserError: of the class ``error``: another process holds the lock, or the disk refuses.
        """
        began, pause, reported = time.monotonic(), 0.05, False
        try:
            holder = _holder(self._path)
            other = _objects.get(holder.token) if holder is not None and holder.is_here else None
            if other is self:
                return
            # An object that has lost the lock must touch it no more.
            self._release()
            if other is not None and not other._firm:
                other._release()
            remove_left(self._path)
            while not self._created(self._path) and not self._taken_over(self._path):
                holder = _holder(self._path)
                if holder is None:
                    continue
                patience = (0.0 if holder.is_here else here) if holder.is_near else elsewhere
                if time.monotonic() >= began + patience:
                    raise self._error(self._busy.replace("{holder}", holder.name))
                if not holder.is_near and not reported:
                    waiting(holder.name)
                    reported = True
                time.sleep(pause)
                pause = min(2 * pause, 2.0)
        except OSError as error:
            raise self._error(
                f"{self._path.parent}: cannot be locked: {error.strerror}; check its owner, its space, and "
                "that its file system has hard links"
            ) from error
        self._remove_claims()
        released = threading.Event()
        self._release = weakref.finalize(
            self, _release, self._path, self._token, os.getpid(), released
        )
        touching = (self._path, released, self._beat)
        _start_without_signals(threading.Thread(target=_keep_alive, args=touching, daemon=True))

    def release(self) -> None:
        """Release the lock, if this object has it."""
        self._firm = False
        self._release()

    def _taken_over(self, lock: Path) -> bool:
        """Replace a stale lock by this process's lock; of several processes exactly one succeeds.

        The name of the new file contains the token of the stale lock: only one process can create the file,
        and only this process may replace the lock. If the process died in between, its file is a stale lock
        too, and is taken over in the same way.
        """
        stale = _holder(lock)
        if stale is None:
            return False
        claim = lock.with_name(f".{self._path.name}.{stale.token}")
        if not self._created(claim) and not self._taken_over(claim):
            return False
        replaceable = False
        try:
            # Read again, now that no other process can replace the lock: the first answer may be old.
            found = _holder(lock)
            if found is not None and found.token == stale.token:
                age = claim.stat().st_mtime - found.touched
                replaceable = found.has_ended or age > self._stale_after
            if replaceable:
                claim.replace(lock)
        except FileNotFoundError:
            # Another process has the lock by now, and has removed the claim.
            return False
        finally:
            # After the rename, a file of this name is the claim of another process.
            if not replaceable:
                claim.unlink(missing_ok=True)
        return replaceable

    def _remove_claims(self) -> None:
        """Remove the claims that killed processes have left; claims of this lock may be in use."""
        claim = re.compile(rf"\.{re.escape(self._path.name)}\.([0-9a-f]+)")
        with contextlib.suppress(OSError):
            for path in [*self._path.parent.iterdir()]:
                found = claim.fullmatch(path.name)
                if found is not None and found[1] != self._token:
                    path.unlink(missing_ok=True)

    def _created(self, path: Path) -> bool:
        """Create ``path`` with this process's name; return False if it exists. Raises OSError."""
        record = {
            **{"pid": os.getpid(), "host": socket.gethostname(), "space": process_space()},
            **{"token": self._token, "job": _job()},
        }
        draft = draft_of(self._path)
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as stream:  # noqa: PTH123  (a descriptor, so that the mode holds)
                json.dump(record, stream)
            try:
                os.link(draft, path)
            except FileExistsError:
                # The server may have lost its answer to a link that it made (open(2), NFS).
                return draft.stat().st_nlink > 1
            return True
        finally:
            draft.unlink(missing_ok=True)


class _Holder(NamedTuple):
    """The content of a lock. Of a damaged lock, the token is the inode.

    ``touched``: in seconds of the file server.
    """

    token: str
    touched: float
    name: str = "an unknown process"
    is_near: bool = True
    is_here: bool = False
    has_ended: bool = True


def _holder(lock: Path) -> _Holder | None:
    """Return the holder of ``lock``, or None if there is no lock; raises OSError."""
    try:
        found = lock.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    value: dict[str, Any] = read_json(lock) or {} if stat.S_ISREG(found.st_mode) else {}
    token, space, pid, job = (value.get(key) for key in ("token", "space", "pid", "job"))
    if not re.fullmatch("[0-9a-f]{16}", str(token)) or not space or type(pid) is not int:
        return _Holder(str(found.st_ino), found.st_mtime)
    near = space == process_space()
    here = near and pid == os.getpid()
    ours = _objects.get(str(token))
    ended = (ours is None or not ours._firm) if here else near and not runs(pid)
    mine = _job()
    if isinstance(job, list) and mine is not None and job[:1] == mine[:1] and job != mine:
        # Slurm has ended the earlier start.
        ended = True
    name = "this process" if here else f"process {pid} on {value.get('host')}"
    return _Holder(str(token), found.st_mtime, name, near, here, ended)


def _job() -> list[str] | None:
    """Return the cluster and number of this Slurm job, and its attempt; None outside of jobs."""
    job, cluster = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_CLUSTER_NAME", "")
    return [f"{cluster}/{job}", attempt_here("", os.environ).label] if job else None


def _release(path: Path, token: str, pid: int, released: threading.Event) -> None:
    """Remove the lock, if it is still that of ``token``; a forked child leaves its parent's lock."""
    released.set()
    # A lock that cannot be read or removed ends with this process.
    with contextlib.suppress(OSError):
        holder = _holder(path) if pid == os.getpid() else None
        if holder is not None and holder.token == token:
            path.unlink(missing_ok=True)


def _keep_alive(path: Path, released: threading.Event, beat: float) -> None:
    while not released.wait(beat):
        # If the file server does not answer, the next touch follows in a few seconds.
        with contextlib.suppress(OSError):
            # Without times, utime(2) uses the clock of the file server.
            os.utime(path)


def _start_without_signals(thread: threading.Thread) -> None:
    """Start ``thread`` with blocked signals: only the main thread gets them, and may defer them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
