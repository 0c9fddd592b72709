"""Which incarnation of a run may write to its directory.

After a node failure the old processes may live on (an orphan of a dead slurmd) while the requeued
job already trains. The newer one writes its name here first; whoever finds another name than its own
before a commit must not commit.
"""

import json
import os
import socket
import time

from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import Attempt
from hpcrun.run.files import read_json, write_json


class Superseded(RuntimeError):
    """Another incarnation owns the run: this one must stop without writing anything more."""


def claim(run: RunDirectory, attempt: Attempt) -> None:
    """Make ``attempt`` the only one that may write to ``run``; raises OSError when the disk refuses."""
    write_json(
        run.owner,
        {"owner": attempt.owner, "host": socket.gethostname(), "time": round(time.time(), 3)},
    )


def require_ownership(run: RunDirectory, attempt: Attempt) -> None:
    """Return if ``attempt`` is the run's owner.

    Raises:
        Superseded: a newer incarnation has taken over.
    """
    owner = (read_json(run.owner) or {}).get("owner")
    if owner != attempt.owner:
        raise Superseded(f"{run.name}: {owner} owns this run now; {attempt.owner} stops writing")


class SubmissionLock:
    """Held while a run is being submitted, so that two people cannot start it twice.

    A lock file made with O_EXCL (atomic on NFS v3 and later, open(2)), not flock, which Lustre and
    old NFS do not have. One left by a dead process of this host, or older than ten minutes, is taken over.
    """

    _stale_after = 600.0

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def __enter__(self) -> None:
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time()}
        for _ in range(2):
            try:
                descriptor = os.open(
                    self._run.submitting, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
                )
            except FileExistsError:
                self._take_over_if_stale()
                continue
            except OSError as error:
                raise RunError(
                    f"{self._run.path}: cannot be written: {error.strerror}; check its owner and space"
                ) from error
            try:
                with open(descriptor, "w") as stream:  # noqa: PTH123
                    json.dump(holder, stream)
            except OSError:
                self._run.submitting.unlink(missing_ok=True)
                raise
            return
        raise RunError(
            f"{self._run.path}: somebody is submitting it right now; if not, remove {self._run.submitting}"
        )

    def __exit__(self, *_: object) -> None:
        self._run.submitting.unlink(missing_ok=True)

    def _take_over_if_stale(self) -> None:
        holder = read_json(self._run.submitting) or {}
        try:
            age = time.time() - self._run.submitting.stat().st_mtime
        except FileNotFoundError:
            return
        here = holder.get("host") == socket.gethostname()
        dead = here and not os.path.exists(f"/proc/{holder.get('pid')}")  # noqa: PTH110
        if dead or age > self._stale_after:
            self._run.submitting.unlink(missing_ok=True)
