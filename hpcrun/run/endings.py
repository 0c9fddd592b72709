"""What each rank leaves behind when it fails, in the attempt's log folder.

A failure record is written by the failing process itself; an exit line by whoever watched it
(the local cluster), because a process that was killed writes nothing; a hang by the ranks' watchdogs.
"""

import contextlib
import os
import re
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpcrun.run.io.files import append_line, make_log_folder, read_json, read_lines, write_json
from hpcrun.run.traces import place_of, traceback_of

_TERMINATED = re.compile(
    r"terminate called after throwing an instance of '(?P<kind>[^']+)'\n\s*what\(\): +(?P<what>[^\n]+)"
)
_UNFINISHED = "unfinished"
_HEARD = "heard-stop.json"
_LOG_END = 1 << 16
"""Bytes: what other threads print after such words is less."""

_Ending = TypeVar("_Ending", "Failure", "Exit")


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank. ``where`` is the deepest ``file:line`` in the user's code.

    ``where`` and ``traceback`` are empty for an exception without a traceback: its message is enough.
    ``copy``: the same line in the run's copy of the code, if the copy ran. ``bad_input``: another start would
    fail in the same way.
    """

    rank: int
    host: str
    time: float
    kind: str
    message: str
    where: str
    step: int | None
    traceback: str
    copy: str = ""
    bad_input: bool = False


@dataclass(frozen=True)
class Exit:
    """How a task's process ended, as its watcher saw it: an exit code, or the signal that killed it.

    ``induced``: the watcher itself had told the task to end.
    """

    rank: int
    host: str
    time: float
    code: int | None
    signal: int | None
    induced: bool


@dataclass(frozen=True)
class Hang:
    """Ranks that made no progress, as the watchdog that fired first saw it.

    ``rank`` and ``host``: the one to look at first, None where all wait alike; ``line`` names all.
    ``step``: the newest that any rank had begun.
    """

    rank: int | None
    host: str | None
    time: float
    step: int | None
    line: str


def node_name() -> str:
    """This node, as everything that a person reads calls it: Slurm's name may not be the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def record_failure(
    folder: Path,
    rank: int,
    error: BaseException,
    step: int | None,
    host: str | None = None,
    *,
    bad_input: bool = False,
) -> Failure:
    """Write ``failure-rank-00003.json`` into ``folder``; raises OSError when the disk refuses.

    Args:
        host: where ``rank`` failed; None: this node.
        bad_input: another start would fail in the same way.
    """
    where, copy = place_of(error)
    failure = Failure(
        rank=rank,
        host=host or node_name(),
        time=time.time(),
        kind=type(error).__name__,
        message=str(error),
        where=where,
        step=step,
        traceback=traceback_of(error) if where else "",
        copy=copy,
        bad_input=bad_input,
    )
    make_log_folder(folder)
    write_json(folder / f"failure-rank-{rank:05d}.json", asdict(failure))
    return failure


def read_failures(folder: Path) -> list[Failure]:
    """The failures that the ranks of one attempt wrote, earliest first."""
    read = (read_json(path) for path in folder.glob("failure-rank-*.json"))
    found = (_whole(Failure, value) for value in read if value is not None)
    return sorted((failure for failure in found if failure), key=lambda failure: failure.time)


def record_exit(folder: Path, ended: Exit) -> None:
    """Append to the attempt's ``exits.jsonl``; raises OSError when the disk refuses."""
    append_line(folder / "exits.jsonl", asdict(ended))


def read_exits(folder: Path) -> list[Exit]:
    """How the tasks of one attempt ended, in the order they were seen."""
    found = (_whole(Exit, line) for line in read_lines(folder / "exits.jsonl"))
    return [ended for ended in found if ended]


def last_words(folder: Path, rank: int) -> str | None:
    """What C++ code said in the rank's log when it ended the process, of which Python hears nothing."""
    try:
        with (folder / f"rank-{rank:05d}.log").open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_END))
            found = _TERMINATED.search(log.read().decode(errors="replace"))
    except OSError:
        return None
    return f"{found['kind']}: {found['what'].strip()[:500]}" if found else None


def first_log(folder: Path) -> str:
    """The end of the first log that an attempt's tasks have left, of a rank or of its launcher."""
    for path in sorted(folder.glob("*.log")):
        try:
            with path.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_END))
                return log.read().decode(errors="replace")
        except OSError:
            continue
    return ""


def record_unfinished(folder: Path) -> None:
    """Write down that a script has asked to be continued; raises OSError when the disk refuses."""
    make_log_folder(folder)
    (folder / _UNFINISHED).touch()


def is_unfinished(folder: Path) -> bool:
    """Return whether a rank's script has asked to be continued."""
    return (folder / _UNFINISHED).exists()


def record_heard_stop(folder: Path, cause: str, code: int | None) -> None:
    """Write down that a rank other than rank 0 heard a signal to stop; raises OSError.

    Args:
        cause: terminate or warning.
        code: the exit code of the rank's script, -n for signal n; None: the script had not started.
    """
    make_log_folder(folder)
    # One record is enough: all ranks hear the signal within a moment.
    if not (folder / _HEARD).exists():
        write_json(folder / _HEARD, {"cause": cause, "exit_code": code})


def read_heard_stop(folder: Path) -> tuple[str, int | None] | None:
    """Return (cause, exit code of the script) of a rank other than rank 0 that heard a signal to stop."""
    found = read_json(folder / _HEARD)
    if found is None or not isinstance(found.get("exit_code"), int | None):
        return None
    return str(found.get("cause")), found["exit_code"]


def stacks_path(folder: Path, rank: int) -> Path:
    """Where a rank's watchdog writes the Python stacks of a rank that hangs."""
    return folder / f"stacks-rank-{rank:05d}.txt"


def record_hang(folder: Path, hang: Hang) -> None:
    """Write the attempt's ``hang.json``; raises OSError when the disk refuses."""
    write_json(folder / "hang.json", asdict(hang))


def read_hang(folder: Path) -> Hang | None:
    """The hang that ended the attempt, if one did.

    Where every rank was stuck in code that lets no other thread run, nobody could write the record:
    then the stacks that C code has written are the only trace, and they point at nobody.
    """
    value = read_json(folder / "hang.json")
    if value is not None and isinstance(value.get("time"), int | float):
        with contextlib.suppress(TypeError):
            return Hang(**value)
    written = [path.stat() for path in folder.glob("stacks-rank-*.txt")]
    times = [stat.st_mtime for stat in written if stat.st_size]
    if not times:
        return None
    ranks = "1 rank" if len(times) == 1 else f"{len(times)} ranks"
    return Hang(None, None, min(times), None, f"{ranks} made no progress")


def _whole(kind: type[_Ending], value: dict[str, Any]) -> _Ending | None:
    """The record that ``value`` holds, or None where the file was damaged."""
    if not isinstance(value.get("time"), int | float) or not isinstance(value.get("rank"), int):
        return None
    try:
        return kind(**value)
    except TypeError:
        return None
