"""Which incarnation of a run may write to its directory.

After a node failure the old processes may live on (an orphan of a dead slurmd) while the requeued
job already trains. The newer one writes its name here first; whoever finds another name than its own
before a commit must not commit.
"""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import Attempt
from hpcrun.run.files import read_json, write_json

INCARNATION = os.urandom(8).hex()
"""The random name of this process. Two clusters may give the same number to two jobs of one run."""


class Superseded(RuntimeError):
    """Another incarnation owns the run: this one must stop without writing anything more."""


def claim(run: RunDirectory, attempt: Attempt) -> None:
    """Make this process, for ``attempt``, the only one that may write to ``run``.

    Raises:
        OSError: the disk refuses.
    """
    cluster = os.environ.get("SLURM_CLUSTER_NAME")
    write_json(
        run.owner,
        {
            "owner": attempt.owner,
            **({"cluster": cluster} if cluster else {}),
            "incarnation": INCARNATION,
            "host": socket.gethostname(),
            "time": round(time.time(), 3),
        },
    )


def require_ownership(
    run: RunDirectory, attempt: Attempt, *, patience: float = 30.0, pause: float = 0.5
) -> None:
    """Return if this process is the run's owner, for ``attempt``.

    A file that cannot be read, or is not there, says nothing about a newer incarnation: on a network file
    system both pass. It is read again until ``patience`` is over.

    Args:
        patience: seconds for which the file may be missing or unreadable.
        pause: seconds before the second look; doubled for each further one.

    Raises:
        Superseded: a newer incarnation has taken over, or the file stays missing.
        OSError: the file stays unreadable.
    """
    late = time.monotonic() + patience
    while True:
        try:
            owner = read_json(run.owner) or {}
        except OSError:
            if time.monotonic() + pause > late:
                raise
        else:
            if owner.get("owner") == attempt.owner and owner.get("incarnation") == INCARNATION:
                return
            if "owner" in owner or time.monotonic() + pause > late:
                words = f"{described(owner)} owns this run now" if owner else "owner.json is gone"
                raise Superseded(f"{run.name}: {words}; {attempt.owner} stops writing")
        time.sleep(pause)
        pause *= 2


def described(owner: Mapping[str, Any]) -> str:
    """The owner in the content of an ``owner.json``, in words: attempt, cluster and host."""
    cluster = f" of cluster {owner['cluster']}" if "cluster" in owner else ""
    return f"{owner.get('owner')}{cluster} (rank 0 on {owner.get('host')})"


class OwnerLooks:
    """The moments at which a rank reads ``owner.json`` while a script runs.

    A rank reads the file every five seconds. In a large world each rank reads it less often, and all ranks
    at different moments, so that all together read it at most ``PER_SECOND`` times a second.
    """

    SHORTEST = 5.0
    PER_SECOND = 100.0

    def __init__(self, rank: int, ranks: int) -> None:
        self.pause = max(self.SHORTEST, ranks / self.PER_SECOND)
        self._share = (rank + 1) / ranks
        self._next = float("-inf")

    def due(self, now: float) -> bool:
        """Return whether to read the file now; ``now`` is in seconds of any clock."""
        if now < self._next:
            return False
        first = self._next == float("-inf")
        self._next = now + self.pause * (self._share if first else 1.0)
        return True


class SubmissionLock:
    """Held while a run is being submitted, so that two people cannot start it twice.

    A lock file made with O_EXCL (atomic on NFS v3 and later, open(2)), not flock, which Lustre and
    old NFS do not have. Its holder touches it every few seconds. A lock of a dead process of this host,
    or one that nobody has touched for three minutes, is taken over. All times come from the file
    server: its clock and this host's may differ by minutes.
    """

    # Longer than a few beats and the minute for which an NFS client may show an old time (acregmax).
    _stale_after = 180.0
    _beat = 10.0

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._token = os.urandom(8).hex()
        self._released = threading.Event()

    def __enter__(self) -> None:
        if not self._created() and not self._taken_over():
            raise RunError(
                f"{self._run.path}: somebody is submitting it right now; if not, remove "
                f"{self._run.submitting}"
            )
        _start_without_signals(threading.Thread(target=self._keep_alive, daemon=True))

    def __exit__(self, *_: object) -> None:
        self._released.set()
        if _holder(self._run.submitting)[0] == self._token:
            self._run.submitting.unlink(missing_ok=True)

    def _created(self) -> bool:
        try:
            self._write(self._run.submitting)
        except FileExistsError:
            return False
        except OSError as error:
            raise RunError(
                f"{self._run.path}: cannot be written: {error.strerror}; check its owner and space"
            ) from error
        return True

    def _taken_over(self, lock: Path | None = None) -> bool:
        """Put our lock in the place of a stale one; exactly one of several that try succeeds.

        The name of the new file holds the token of the stale lock: only one process can make it, and
        only the process that made it may replace that lock. A process that died in between has left that
        file, which is then taken over in the same way.
        """
        lock = lock or self._run.submitting
        stale, _, _ = _holder(lock)
        if stale is None:
            return lock == self._run.submitting and self._created()
        claim = lock.with_name(f".{self._run.submitting.name}.{stale}")
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
                os.utime(self._run.submitting)


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
