"""The end of a log: its last lines, and the exception that they name."""

from pathlib import Path

from hpcrun.run.files import end_of

_END = 1 << 16
"""Bytes that are read from the end of a log."""
_TRACEBACK = "Traceback (most recent call last):"


def end_of_log(path: Path) -> str:
    """Return the last 64 KiB of a log as text; "" if it cannot be read."""
    return end_of(path, _END).decode(errors="replace")


def exception_line(text: str) -> str | None:
    """Return the line of the last traceback in ``text`` that names the exception, or None."""
    _, found, rest = text.rpartition(_TRACEBACK)
    if not found:
        return None
    lines = rest.splitlines()[1:]
    named = (line.strip() for line in lines if line.strip() and not line.startswith((" ", "\t")))
    line = next(named, None)
    return line[:500] if line else None
