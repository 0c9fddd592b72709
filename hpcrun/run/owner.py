"""Ownership of a run: only one attempt may write to its directory.

After a node failure, stale processes (orphans of a dead slurmd) may continue while the requeued job trains.
The newer attempt writes its name into the owner record first. A process that finds another name in the record
before a commit must not commit.
"""

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt
from hpcrun.run.io.files import read_json, write_json
from hpcrun.run.io.lock_file import LockFile
from hpcrun.run.sweep_file import is_element

INCARNATION = os.urandom(8).hex()
"""Random name of this process: two clusters may give the same job number to two jobs of a run."""


class OwnedByAnotherAttempt(RuntimeError):
    """Another attempt owns the run: this process must stop without further writes."""


def claim(run: RunDirectory, attempt: Attempt) -> None:
    """Make this process the owner of ``run``, for ``attempt``: no other process may write.

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

    A missing or unreadable file does not prove a newer attempt, because both can be temporary on a network
    file system. The file is read again for ``patience`` seconds.

    Args:
        patience: seconds for which the file may be missing or unreadable.
        pause: seconds before the second read; doubled for each further read.

    Raises:
        OwnedByAnotherAttempt: a newer attempt owns the run, or the file stays missing.
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
                raise OwnedByAnotherAttempt(f"{run.name}: {words}; {attempt.owner} stops writing")
        time.sleep(pause)
        pause *= 2


def described(owner: Mapping[str, Any]) -> str:
    """Describe the owner in an ``owner.json``: attempt, cluster and host."""
    cluster = f" of cluster {owner['cluster']}" if "cluster" in owner else ""
    return f"{owner.get('owner')}{cluster} (rank 0 on {owner.get('host')})"


class OwnerPolling:
    """Schedule of a rank's reads of ``owner.json`` while a script runs.

    A rank reads the file every five seconds. With many ranks, each rank reads less often, at different times,
    so that all ranks together read at most ``PER_SECOND`` times per second.
    """

    SHORTEST = 5.0
    PER_SECOND = 100.0

    def __init__(self, rank: int, ranks: int) -> None:
        self.pause = max(self.SHORTEST, ranks / self.PER_SECOND)
        self._share = (rank + 1) / ranks
        self._next = float("-inf")

    def due(self, now: float) -> bool:
        """Return True if the file is to be read now; ``now`` is in seconds of any clock."""
        if now < self._next:
            return False
        first = self._next == float("-inf")
        self._next = now + self.pause * (self._share if first else 1.0)
        return True


class SubmissionLock(LockFile):
    """Held while a run is being submitted, so that two people cannot start it twice.

    The elements of a sweep share the lock of the sweep's folder: one submission may start a thousand runs.
    """

    def __init__(self, run: RunDirectory, *, beat: float = 10.0) -> None:
        """Prepare the lock of ``run``; ``beat``: seconds between two touches."""
        held = RunDirectory(run.path.parent) if is_element(run) else run
        busy = (
            f"{held.path}: another process is submitting this run ({{holder}}); if not, remove "
            f"{held.submitting}"
        )
        super().__init__(held.submitting, busy, beat=beat)
