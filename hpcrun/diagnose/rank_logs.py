"""The reason for a rank's end in its own log, if the rank wrote no record."""

import re
from pathlib import Path

from hpcrun.run.endings import last_words
from hpcrun.run.io.files import end_of

_END = 1 << 16
"""Bytes that are read from the end of a log."""

_EXECVE = re.compile(r"^(?P<prefix>.*)error: execve\(\): (?P<what>.+)$", re.MULTILINE)
_STEPD = re.compile(r"slurmstepd-(?P<host>[^\s:]+): $")
_TRACEBACK = "Traceback (most recent call last):"


def words_at_exit(folder: Path, rank: int) -> str | None:
    """Return why ``rank`` exited with a code: slurmstepd's message, C++'s, or its traceback's last line."""
    text = end_of_log(folder / f"rank-{rank:05d}.log")
    unstarted = _EXECVE.search(text)
    if unstarted:
        return f"execve(): {unstarted['what']}"
    return last_words(folder, rank) or exception_line(text)


def exception_line(text: str) -> str | None:
    """Return the line of the last traceback in ``text`` that names the exception, or None."""
    _, found, rest = text.rpartition(_TRACEBACK)
    if not found:
        return None
    lines = rest.splitlines()[1:]
    named = (line.strip() for line in lines if line.strip() and not line.startswith((" ", "\t")))
    line = next(named, None)
    return line[:500] if line else None


def node_without_program(folder: Path) -> tuple[str | None, str] | None:
    """Return (node, slurmstepd's message) if the ranks' program is missing on some nodes but not on all.

    The node is None if the message does not name it. None for all if every rank with a message
    failed to start, or none did.
    """
    failed: dict[str, re.Match[str]] = {}
    started = False
    for path in sorted(folder.glob("rank-*.log")):
        text = end_of_log(path)
        found = _EXECVE.search(text)
        if found:
            failed[path.name] = found
        else:
            started = started or bool(text.strip())
    if not failed or not started:
        return None
    first = next(iter(failed.values()))
    host = _STEPD.search(first["prefix"])
    return (host and host["host"]), first["what"]


def end_of_log(path: Path) -> str:
    """Return the last 64 KiB of a log as text; "" if it cannot be read."""
    return end_of(path, _END).decode(errors="replace")
