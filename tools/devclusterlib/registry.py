"""The clusters of this machine, and a lock for `up` and `down`.

``--root`` may have chosen a cluster's directory; a later `down --name` must find it. A cluster
may also belong to a process (a test run). After the death of that process, any user may remove the cluster.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .processes import ProcessId

REGISTRY = Path("/run/devcluster")


@dataclass(frozen=True)
class Entry:
    """One registered cluster: its name, directory, job user and owner process."""

    name: str
    root: Path
    user: str
    owner: ProcessId | None

    @property
    def abandoned(self) -> bool:
        """Return True if the owner process of the cluster has ended."""
        return self.owner is not None and not self.owner.alive()


def register(entry: Entry) -> None:
    """Record the directory of the cluster, before any part of it exists."""
    REGISTRY.mkdir(mode=0o755, exist_ok=True)
    owner = [entry.owner.pid, entry.owner.started] if entry.owner else None
    temporary = REGISTRY / f".{entry.name}.{os.getpid()}"
    temporary.write_text(json.dumps({"root": str(entry.root), "user": entry.user, "owner": owner}))
    temporary.replace(REGISTRY / f"{entry.name}.json")


def forget(name: str) -> None:
    """Remove the entry; the last step of a `down`."""
    (REGISTRY / f"{name}.json").unlink(missing_ok=True)


def find(name: str) -> Entry | None:
    """Return the entry of ``name``, or None."""
    try:
        raw = json.loads((REGISTRY / f"{name}.json").read_text())
        owner = ProcessId(*raw["owner"]) if raw["owner"] else None
        return Entry(name, Path(raw["root"]), raw["user"], owner)
    except (OSError, ValueError, KeyError):
        return None


def entries() -> list[Entry]:
    """Return all registered clusters by name."""
    if not REGISTRY.is_dir():
        return []
    names = sorted(path.stem for path in REGISTRY.glob("[!.]*.json"))
    return [entry for name in names if (entry := find(name)) is not None]


@contextmanager
def exclusive(directory: Path = REGISTRY) -> Iterator[None]:
    """Lock ``directory`` for one process at a time: by default the clusters and their users.

    The lock is on the directory itself, so that no lock file must be removed later.
    """
    directory.mkdir(mode=0o755, exist_ok=True)
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    os.set_inheritable(handle, True)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
