"""Striping on Lustre: one file a rank wants one stripe, since many ranks spread over the servers anyway.

Lustre Operations Manual, "Managing File Layout": a folder's default layout holds for the files made in it.
"""

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

_TIMEOUT = 10.0


def setstripe_command(folder: Path) -> list[str]:
    """The command that gives files in ``folder`` one stripe each."""
    return ["lfs", "setstripe", "--stripe-count", "1", str(folder)]


def is_lustre(folder: Path, mounts: str) -> bool:
    """Whether ``folder`` lies on Lustre, by the text of /proc/mounts: the longest mount point counts."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].encode().decode("unicode_escape")
        inside = folder == Path(point) or Path(point) in folder.parents
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind == "lustre"


def stripe(folder: Path) -> None:
    """Set the layout where there is Lustre and its tool; a refusal costs speed, not correctness."""
    if shutil.which("lfs") is None:
        return
    with suppress(OSError, subprocess.SubprocessError):
        if is_lustre(folder.resolve(), Path("/proc/mounts").read_text()):
            subprocess.run(
                setstripe_command(folder), capture_output=True, timeout=_TIMEOUT, check=False
            )
