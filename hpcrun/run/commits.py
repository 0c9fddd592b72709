"""The committed steps, as far as the folder of checkpoints shows them without the commit protocol.

A crash right after a commit can lose the event of the commit, but not the commit.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcrun.run.directory import RunDirectory
from hpcrun.run.io.files import read_json

_COMMITTED = re.compile(r"step-(\d{9,})")


@dataclass(frozen=True)
class Commit:
    """A committed step. ``owner``: the attempt that wrote it; ``time``: Unix seconds."""

    step: int
    owner: str
    time: float


def newest_commit(run: RunDirectory) -> Commit | None:
    """Return the newest checkpoint with a readable manifest, without a check of hashes; None without any.

    Unreadable manifests are ignored: a restore skips and reports them.
    """
    try:
        names = [path.name for path in run.checkpoints.iterdir()]
    except OSError:
        return None
    for step in committed_steps(names):
        try:
            manifest = read_json(run.checkpoints / step_name(step) / "manifest.json") or {}
        except OSError:
            continue
        owner, created = manifest.get("owner"), manifest.get("created")
        if isinstance(owner, str) and isinstance(created, int | float):
            return Commit(step, owner, float(created))
    return None


def has_commit(run: RunDirectory) -> bool:
    """Return True if a checkpoint has a manifest, which is not read: that of many ranks is long."""
    try:
        names = [path.name for path in run.checkpoints.iterdir()]
    except OSError:
        return False
    manifests = (
        run.checkpoints / step_name(step) / "manifest.json" for step in committed_steps(names)
    )
    return any(_has_content(path) for path in manifests)


def _has_content(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size > 0
    except OSError:
        return False


def steps_listed_anew(run: RunDirectory) -> list[int]:
    """Return the committed steps, newest first, from a listing that bypasses this node's cache.

    Raises:
        OSError: the folder exists but cannot be listed.
    """
    for folder in (run.path, run.checkpoints):
        _drop_listing(folder)
    try:
        with os.scandir(run.checkpoints) as entries:
            return committed_steps(entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _drop_listing(folder: Path) -> None:
    """Create and remove a file: after its own change, an NFS client asks the server again (nfs(5))."""
    # The cleanup of a save removes files with this prefix.
    probe = folder / f".trash-look-{os.urandom(6).hex()}"
    # A folder without write permission can still be listed.
    with contextlib.suppress(OSError):
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            probe.unlink()


def step_name(step: int) -> str:
    """Return the name of the folder of ``step``."""
    return f"step-{step:09d}"


def committed_steps(names: Iterable[str]) -> list[int]:
    """Return the committed steps, newest first, from the names in the folder of checkpoints."""
    found = (_COMMITTED.fullmatch(name) for name in names)
    return sorted((int(match[1]) for match in found if match), reverse=True)
