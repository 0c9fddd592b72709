"""What the checkpoints' folder tells without their protocol: which step was committed last, and by whom.

A crash right after a commit swallows the announcement of it, never the commit.
"""

import re
from dataclasses import dataclass

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json

_COMMITTED = re.compile(r"step-(\d{9,})")


@dataclass(frozen=True)
class Commit:
    """A committed step; ``owner`` is the name of the attempt that wrote it, ``time`` in Unix seconds."""

    step: int
    owner: str
    time: float


def newest_commit(run: RunDirectory) -> Commit | None:
    """The newest checkpoint that has a manifest, whose hashes nobody compares here; None without any.

    What cannot be read does not count: a restore passes it over too, and is who tells of it.
    """
    try:
        names = [path.name for path in run.checkpoints.iterdir()]
    except OSError:
        return None
    steps = sorted(
        (int(match[1]) for match in map(_COMMITTED.fullmatch, names) if match), reverse=True
    )
    for step in steps:
        try:
            manifest = read_json(run.checkpoints / f"step-{step:09d}" / "manifest.json") or {}
        except OSError:
            continue
        owner, created = manifest.get("owner"), manifest.get("created")
        if isinstance(owner, str) and isinstance(created, int | float):
            return Commit(step, owner, float(created))
    return None
