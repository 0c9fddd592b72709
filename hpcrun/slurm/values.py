"""The forms in which Slurm prints job ids, times, durations and lists of nodes."""

import re
import time

from hpcrun.slurm.hostlist import expand

JOB_ID = re.compile(r"[0-9]+(?:[_+][0-9]+)?")


def unix_time(text: str) -> float | None:
    """Read a time as Slurm prints it: Unix seconds, or ISO in this machine's time zone.

    ``N/A``, ``NONE``, ``Unknown`` and the like are None.
    """
    text = text.strip()
    if text.isdecimal():
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


def seconds(text: str) -> int | None:
    """Read a duration ``D-HH:MM:SS``, also without its first parts; UNLIMITED and such: None."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def host_names(nodes: str) -> tuple[str, ...]:
    """Expand a node list; a job without nodes shows "", "None assigned" or "(null)"."""
    if nodes in ("", "None assigned", "(null)", "n/a"):
        return ()
    return tuple(expand(nodes))
