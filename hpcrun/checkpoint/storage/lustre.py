"""Striping on Lustre: each rank's file gets one stripe, since many files already spread over the servers.

Lustre Operations Manual, "Managing File Layout": files inherit the default layout of their folder.
"""

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

_TIMEOUT = 10.0


def setstripe_command(folder: Path) -> list[str]:
    """Return the command that gives each file in ``folder`` one stripe."""
    return ["lfs", "setstripe", "--stripe-count", "1", str(folder)]


def is_lustre(folder: Path, mounts: str) -> bool:
    """Return True if ``folder`` is on Lustre, by the longest matching mount point in /proc/mounts."""
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
    """Set the layout if Lustre and its tool are present; a refusal costs only speed."""
    if shutil.which("lfs") is None:
        return
    with suppress(OSError, subprocess.SubprocessError):
        if is_lustre(folder.resolve(), Path("/proc/mounts").read_text()):
            subprocess.run(
                setstripe_command(folder), capture_output=True, timeout=_TIMEOUT, check=False
            )
