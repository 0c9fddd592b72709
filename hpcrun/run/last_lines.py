"""The newest lines of append-only files, so that a table of many runs reads only their ends."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Event, to_event
from hpcrun.run.io.files import intact_lines, open_regular, parse_line

EVENTS_READ = 1 << 16
"""Bytes of an event log: about 450 events. A run that saves every hour writes as many in two weeks."""

_HEAD = 8192
_MOST = 1 << 40
_STARTS = ("submitted", "opened")


@dataclass(frozen=True)
class LastLines:
    """The JSON objects at the end of a file. ``whole`` is True if ``values`` has every object of the file."""

    values: Sequence[dict[str, Any]]
    whole: bool


def last_lines(path: Path, size: int) -> LastLines:
    """Return the JSON objects in the last ``size`` bytes of ``path``; damaged lines are skipped."""
    try:
        with open_regular(path) as stream:
            length = stream.seek(0, os.SEEK_END)
            begin = max(0, length - size)
            stream.seek(begin)
            lines = stream.read(length - begin).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return LastLines((), True)
    # A read that begins in the middle of the file cuts the first line.
    return LastLines(_objects([line for line in lines[1 if begin else 0 :] if line]), not begin)


def _objects(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the JSON objects of ``lines``, without damaged lines."""
    lines = intact_lines(lines)
    try:
        # One call for all lines takes a third of the time. If a line has NaN, read the lines one by one.
        whole = orjson.loads(b"[" + b",".join(lines) + b"]")
        if len(whole) == len(lines) and set(map(type, whole)) <= {dict}:
            return list(whole)
    except (ValueError, RecursionError):
        pass
    return [value for line in lines if (value := parse_line(line)) is not None]


@dataclass(frozen=True)
class Recent:
    """The newest events of a run. ``began``: the time of the very first event (Unix seconds)."""

    events: Sequence[Event]
    whole: bool
    began: float | None


class RecentEvents:
    """The event logs of many runs, each read once, and only its end.

    The submission, or the start of the newest attempt, names the job of the run. If the end of a log has
    neither, as after thousands of saves, the beginning is read too; if the beginning belongs to another
    attempt, twice as much of the end is read.

    Args:
        before: the result of an earlier read; a log of unchanged length is not read again.
        size: bytes; None: whole logs.
    """

    def __init__(
        self, before: "RecentEvents | None" = None, size: int | None = EVENTS_READ
    ) -> None:
        self._size = _MOST if size is None else size
        self._old = {} if before is None else before._read
        self._read: dict[Path, tuple[tuple[int, int, int] | None, Recent]] = {}

    def __call__(self, run: RunDirectory) -> Sequence[Event]:
        """Return the newest events of ``run``, oldest first; raises OSError if they cannot be read."""
        return self.of(run).events

    def of(self, run: RunDirectory) -> Recent:
        """Return the newest events of ``run``, and whether they are all; raises OSError."""
        if run.path not in self._read:
            mark = signature(run.events)
            old = self._old.get(run.path)
            same = old is not None and mark is not None and old[0] == mark
            self._read[run.path] = old if old and same else (mark, self._recent(run.events))
        return self._read[run.path][1]

    def _recent(self, path: Path) -> Recent:
        size = self._size
        while True:
            found = last_lines(path, size)
            events = [event for value in found.values if (event := to_event(value)) is not None]
            if found.whole:
                return Recent(events, True, events[0].time if events else None)
            head = _head(path)
            began = head[0].time if head else None
            if any(event.what in _STARTS for event in events):
                return Recent(events, False, began)
            attempts = {event.attempt for event in events if event.attempt}
            opened = {event.attempt for event in head if event.what == "opened"}
            if attempts and attempts <= opened:
                starts = [event for event in head if event.what in (*_STARTS, "started")]
                return Recent([*starts, *events], False, began)
            size *= 2


def signature(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with each line appended to the file; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _head(path: Path) -> list[Event]:
    """Return the events at the beginning of a log."""
    with open_regular(path) as stream:
        lines = stream.read(_HEAD).split(b"\n")[:-1]
    return [event for line in lines if (event := to_event(parse_line(line) or {})) is not None]


Reader = Callable[[RunDirectory], Sequence[Event]]
"""Returns the events of a run, as ``read_events`` does."""
