"""Lustre's program ``lfs``: the stripe count of a folder, and advice on it.

New files inherit the layout of their folder. Source: Lustre Software Release 2.x Operations Manual, "Managing
File Layout (Striping) and Free Space".
"""

import re
import shlex
import subprocess
from pathlib import Path

from hpcrun.storage.errors import amount

MAGIC = 0x0BD00BD0
"""Type of the file system in statfs(2): LL_SUPER_MAGIC."""

_TIMEOUT = 10.0
_GIGABYTES = 1_000_000_000
# Stripes for files below and from 10 GB: enough for the rate of a rank, few enough for many ranks.
_FEW, _MANY = 4, 8


def getstripe_command(folder: Path) -> list[str]:
    """Build the call that prints the stripe count of new files in ``folder`` (lfs-getstripe(1))."""
    return ["lfs", "getstripe", "-d", "-c", str(folder)]


def parse_getstripe(text: str) -> int | None:
    """Return the stripe count in the output of :func:`getstripe_command`; None without a number.

    Of a progressive layout, the last component counts: it holds the end of a large file. -1 means all OSTs,
    and 0 the default of the file system.
    """
    found = re.findall(r"(?<![\w.-])-?\d+$", text, re.MULTILINE)
    return int(found[-1]) if found else None


def setstripe_command(folder: Path, largest: int) -> list[str]:
    """Build the call that stripes new files of ``largest`` bytes in ``folder`` (lfs-setstripe(1))."""
    count = _FEW if largest < 10 * _GIGABYTES else _MANY
    return ["lfs", "setstripe", "-c", str(count), str(folder)]


def stripe_count(folder: Path) -> int | None:
    """Run ``lfs`` and return the stripe count of new files in ``folder``; None if it gives none."""
    try:
        done = subprocess.run(
            getstripe_command(folder),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_getstripe(done.stdout) if done.returncode == 0 else None


def advice(folder: Path, largest: int) -> str | None:
    """Return a line of advice if files of ``largest`` bytes in ``folder``, on Lustre, have one stripe."""
    if stripe_count(folder) != 1:
        return None
    command = shlex.join(setstripe_command(folder, largest))
    return (
        f"{folder}: Lustre writes each file to one OST (stripe count 1), and the largest file of a save has "
        f"{amount(largest)}; `{command}` divides the files of later saves among several OSTs"
    )
