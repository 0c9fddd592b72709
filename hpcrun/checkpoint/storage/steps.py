"""The names of committed steps in the folder of checkpoints. Nothing here reads a checkpoint."""

import re
from collections.abc import Iterable
from pathlib import Path

from hpcrun.run.directory import RunDirectory

_COMMITTED = re.compile(r"step-(\d{9,})")


def step_name(step: int) -> str:
    """Return the name of the folder of ``step``."""
    return f"step-{step:09d}"


def committed_steps(names: Iterable[str]) -> list[int]:
    """Return the committed steps, newest first, from the names in the folder of checkpoints."""
    found = (_COMMITTED.fullmatch(name) for name in names)
    return sorted((int(match[1]) for match in found if match), reverse=True)


def has_commit(run: RunDirectory) -> bool:
    """Return True if a checkpoint has a manifest, which is not read: that of many ranks is long."""
    try:
        names = [path.name for path in run.checkpoints.iterdir()]
    except OSError:
        return False
    return any(
        _has_content(run.checkpoints / step_name(step) / "manifest.json")
        for step in committed_steps(names)
    )


def _has_content(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size > 0
    except OSError:
        return False
