"""The cause of a failed attempt in one line, found once within a time limit, and kept with the logs.

`hpcrun status` shows up to twenty failed runs; their logs may have any size.
"""

import contextlib
import io
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpcrun.diagnose.finding import FailureFinding, find_cause, find_certain_cause
from hpcrun.diagnose.read_log import LogLine, rank_of_file, read_stream
from hpcrun.diagnose.run_lines import attempt_to_diagnose, lines_of_attempt
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import open_regular, read_json, write_json
from hpcrun.run.journal.state import State

# Bytes read from each log. `hpcrun doctor` reads more.
_HEAD, _TAIL, _MOST_FILES = 1 << 14, 1 << 16, 64
_NAME = "cause.json"
# Seconds for the cause that decides about a restart.
_HOPELESS = 10.0


class _TooLong(Exception):
    """The time is over."""


def brief_cause(run: RunDirectory, state: State, seconds: float) -> str | None:
    """Return the cause of the newest attempt's failure in one line, and keep it; None if it is unknown.

    Args:
        run: a run that no job has.
        state: its state, by its journal.
        seconds: the limit for a cause that is not kept yet; after it, the cause is unknown.
    """
    attempt = attempt_to_diagnose(state)
    if attempt is None:
        return None
    kept = run.attempt_logs(attempt) / _NAME
    # A run that continues has more events.
    mark = {"events": len(state.events)}
    with contextlib.suppress(OSError):
        known = read_json(kept)
        if known is not None and mark.items() <= known.items():
            line = known.get("cause")
            return line if isinstance(line, str) else None
    lines = lines_of_attempt(run, attempt, state, most_files=_MOST_FILES, read=_ends)
    try:
        found = find_cause(_within(lines, seconds), state.nodes_of(attempt))
    except (OSError, _TooLong):
        found = None
    line = found.line if found and found.confidence != "low" else None
    with contextlib.suppress(OSError):
        write_json(kept, {**mark, "cause": line})
    return line


def hopeless_cause(run: RunDirectory, attempt: Attempt, nodes: int) -> FailureFinding | None:
    """Return what ``hpcrun doctor`` finds in the logs of ``attempt``, if a retry never helps.

    Args:
        nodes: the number of nodes of the attempt, 0 if unknown.

    Raises:
        OSError: a log cannot be read.
    """
    lines = lines_of_attempt(run, attempt, State(()), most_files=_MOST_FILES, read=_ends)
    try:
        return find_certain_cause(_within(lines, _HOPELESS), nodes)
    except _TooLong:
        return None


def _within(lines: Iterable[LogLine], seconds: float) -> Iterator[LogLine]:
    begun = time.thread_time()
    for line in lines:
        if time.thread_time() - begun > seconds:
            raise _TooLong
        yield line


def _ends(path: Path, shown: str) -> Iterator[LogLine]:
    """Yield the first and the last lines of a log, without reading the bytes between them."""
    with open_regular(path) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        if size <= _HEAD + _TAIL:
            content = stream.read(size)
        else:
            # Both cuts are within a line.
            content = stream.read(_HEAD).rpartition(b"\n")[0] + b"\n"
            stream.seek(size - _TAIL)
            content += stream.read(_TAIL).partition(b"\n")[2]
    return read_stream(io.BytesIO(content), shown, rank=rank_of_file(path))
