"""The record of a run, for later readers: command line, commit, uncommitted changes, versions.

After a node failure, stale processes (orphans of a dead slurmd) may continue while the requeued job trains.
The newer attempt writes its name into the owner record first. A process that finds another name in the record
before a commit must not commit.
"""

import getpass
import hashlib
import os
import platform
import shlex
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json, write_json
from hpcrun.run.lock_file import LockFile
from hpcrun.run.snapshot import PRIVATE
from hpcrun.run.sweep_file import is_element

SENT_COMMIT = "HPCRUN_SENT_COMMIT"
"""The variable with the commit of code that another host has sent; ``+`` at its end: with changes."""
# A job must not inherit it.
_sent_commit = os.environ.pop(SENT_COMMIT, None)
_PACKAGES = ("hpcrun", "torch", "submitit", "numpy", "h5py", "pydantic")


def describe(argv: Sequence[str], executor: str, folder: Path) -> dict[str, Any]:
    """Return the identity of a run submitted from ``folder`` with the command line ``argv``."""
    return {
        "created": round(time.time(), 3),
        "command": shlex.join(argv),
        "executor": executor,
        "folder": str(folder),
        "user": user_name(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "git": git_commit(folder),
    }


def user_name() -> str:
    """Return the user's name, or the user id if it has no name (containers)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def git_commit(folder: Path) -> dict[str, Any] | None:
    """Return the commit checked out at ``folder``, and if it has uncommitted changes; None without git."""
    if _sent_commit is not None:
        return {"commit": _sent_commit.removesuffix("+"), "dirty": _sent_commit.endswith("+")}
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit.strip(), "dirty": bool(uncommitted_diff(folder))}


def uncommitted_diff(folder: Path) -> str:
    """Return the uncommitted changes of tracked files, without those with keys, as a patch; may be empty."""
    private = [f":(top,exclude,glob,icase)**/{name}" for name in PRIVATE]
    return _git(folder, "diff", "HEAD", "--", ":/", *private) or ""


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


INCARNATION = os.urandom(8).hex()
"""Random name of this process: two clusters may give the same job number to two jobs of a run.

Read it from this module: a forked process gets another name.
"""


def _rename() -> None:
    global INCARNATION
    INCARNATION = os.urandom(8).hex()


os.register_at_fork(after_in_child=_rename)


def wandb_id(run: RunDirectory) -> str:
    """Return an id that is the same for all attempts of a run, from its name and creation time."""
    created = (read_json(run.record) or {}).get("created")
    return hashlib.sha256(f"{run.name} {created}".encode()).hexdigest()[:16]


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
