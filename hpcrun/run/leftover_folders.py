"""Removal of leftovers in the runs folder: from killed submissions and from deleted runs.

A submission fills a folder ``.NAME.<hex>.new`` and renames it; a killed submission leaves it. A run that is
deleted while its ranks end may leave log files, without config and record.
"""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

from hpcrun.drafts import process_space, runs
from hpcrun.run.io.files import read_json

_STAGED = re.compile(r"\..+\.[0-9a-f]{12}\.new")
_MAKER = ".maker"
# Seconds; a submission fills its folder with five small files.
_LONGEST = 3600.0
_JOB_FILES = ("job.json", "request.json", "controller.log", "cluster")
_IGNORED = re.compile(r"\.unstarted-|\..+\.[0-9a-f]{12}\.tmp$|compile-cache(-\d+)?\.bin$")
_OF_RUNS = {
    *("checkpoints", "code", "events.jsonl", "logs", "metrics.jsonl", "nonfinite", "owner.json"),
    *("profile", "result.json", "submitting.lock", "tensorboard", "uncommitted.patch"),
}


def make_staged(path: Path) -> Path:
    """Make the folder in which the run directory at ``path`` is filled; raises OSError."""
    staged = path.with_name(f".{path.name}.{os.urandom(6).hex()}.new")
    staged.mkdir(mode=0o700)
    maker = {"space": process_space(), "pid": os.getpid()}
    (staged / _MAKER).write_text(json.dumps(maker))
    return staged


def publish(staged: Path, path: Path) -> None:
    """Rename ``staged`` to ``path``; raises OSError if ``path`` exists."""
    (staged / _MAKER).unlink()
    staged.rename(path)


def sweep(staged: Path) -> None:
    """Remove folders of killed submissions next to ``staged``, the folder of a live submission.

    A folder stays while its maker may live: in this process space, while the process runs; on another host
    or in another container, for an hour by the file server's clock. Folders of other users stay.
    """
    with contextlib.suppress(OSError):
        now = staged.stat().st_mtime
        for folder in staged.parent.iterdir():
            if _STAGED.fullmatch(folder.name) and folder != staged and _is_left(folder, now):
                shutil.rmtree(folder, ignore_errors=True)


def clear_deleted_run(path: Path) -> bool:
    """Free the name of a run that was deleted while its ranks ended; return True if it was such a run.

    Raises:
        OSError: the folder cannot be moved away.
    """
    if not holds_only_logs(path):
        return False
    # The rename frees the name even while a rank writes; a later cleanup removes the rest.
    away = path.with_name(f".{path.name}.{os.urandom(6).hex()}.new")
    path.rename(away)
    shutil.rmtree(away, ignore_errors=True)
    return True


def holds_only_logs(folder: Path) -> bool:
    """Return True if ``folder`` holds only logs and metrics of a deleted run."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        names = {entry.name for entry in folder.iterdir() if not _IGNORED.match(entry.name)}
        if not names <= _OF_RUNS or _holds(folder / "checkpoints", "step-*"):
            return False
        return _holds(folder / "logs", "*/restart-*", *(f"*/{name}" for name in _JOB_FILES)) or (
            "metrics.jsonl" in names and names <= {"metrics.jsonl", "events.jsonl", "logs"}
        )
    except OSError:
        return False


def _holds(folder: Path, *patterns: str) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _is_left(folder: Path, now: float) -> bool:
    try:
        maker, age = read_json(folder / _MAKER) or {}, now - folder.stat().st_mtime
    except OSError:
        return False
    here = maker.get("space") == process_space()
    dead = here and not runs(maker.get("pid"))
    return dead or (not here and age > _LONGEST)
