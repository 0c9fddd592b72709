"""Records of a rank's end in the attempt's log folder: failures, exits, hangs.

The failing process writes its failure record. Its watcher (the local cluster) writes the exit line, because a
killed process writes nothing. The watchdogs of the ranks write the record of a hang.

The deepest frame of a traceback is often torch's or Python's, and the first frames are of this package. The
code may have run from the copy in the run directory: the user edits the original.
"""

import contextlib
import os
import re
import signal
import socket
import sysconfig
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpcrun import exit_codes
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import (
    append_line,
    end_of,
    make_log_folder,
    read_json,
    read_lines,
    write_json,
)
from hpcrun.run.journal.events import Stopped

_TERMINATED = re.compile(
    r"terminate called after throwing an instance of '(?P<kind>[^']+)'\n\s*what\(\): +(?P<what>[^\n]+)"
)
# Messages of fork_client.py, the last of a log.
_OF_TASK = re.compile(
    r"^hpcrun: (Memory cgroup out of memory: .+|the fork server of this node has ended.*)$", re.M
)
_UNFINISHED = "unfinished"
_STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# A shell exits with 128 + n if its child died of signal n.
_DIED_OF_STOP = frozenset(code for number in _STOPS for code in (-number, 128 + number))
_CASCADE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|closed by (remote )?peer"
    r"|reset by peer|remote process (has )?exited|communicator was aborted|watchdog"
    r"|socket timeout|timed out waiting|wait timeout|DistNetworkError|DistStoreError"
    r"|failed to recv|connectFullMesh|Gloo.*(closed|timed? ?out)|^(PeerFailed|RankZeroFailed):",
    re.IGNORECASE,
)
_LOG_END = 1 << 16
"""Bytes at the end of a log that are searched; other threads print less after the message."""

READ_FAILURE = "ReadFailure"
"""The kind of the failure of a rank that cannot read a checkpoint which other ranks may be able to read."""
LOG_ENDS = "; its log ends with: "
"""Text before the last line of a log without a traceback."""
OWN_EXIT = "ended itself with exit code"
"""Text for a Python program that chose its exit code: its log has no traceback."""

_Ending = TypeVar("_Ending", "Failure", "Exit")


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank.

    Attributes:
        where: the deepest ``file:line`` in the user's code; empty without a traceback.
        traceback: text of the traceback; empty if the exception has none, since the message is enough.
        copy: the same line in the run's copy of the code, if the copy ran.
        bad_input: True if another start would fail in the same way.
        certain: True if no node and no moment can change the failure.
        passing: "node" if another node may not have the failure, "time" if it may pass; empty: unknown.
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
    certain: bool = False
    passing: str = ""


@dataclass(frozen=True)
class Exit:
    """The end of a task's process, as its watcher saw it: an exit code, or the signal that killed it.

    ``induced``: True if the watcher had asked the task to end.
    """

    rank: int
    host: str
    time: float
    code: int | None
    signal: int | None
    induced: bool


@dataclass(frozen=True)
class Hang:
    """Ranks without progress, as the first watchdog that fired saw them.

    ``rank`` and ``host``: the rank to examine first; None if all ranks wait in the same place. ``line`` names
    all ranks. ``step``: the newest step that any rank had begun.
    """

    rank: int | None
    host: str | None
    time: float
    step: int | None
    line: str


def node_name() -> str:
    """Return the name of this node in all messages: Slurm's node name may differ from the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def record_failure(
    folder: Path,
    rank: int,
    error: BaseException,
    step: int | None,
    host: str | None = None,
    *,
    bad_input: bool = False,
    passing: str = "",
) -> Failure:
    """Write ``failure-rank-00003.json`` into ``folder``; raises OSError when the disk refuses.

    Args:
        host: where ``rank`` failed; None: this node.
        bad_input: another start would fail in the same way.
        passing: the reason why another start may not fail, as in :class:`Failure`.
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
        passing=passing,
    )
    write_failure(folder, failure)
    return failure


def write_failure(folder: Path, failure: Failure) -> None:
    """Write the record of ``failure`` into ``folder``; raises OSError when the disk refuses."""
    make_log_folder(folder)
    write_json(folder / f"failure-rank-{failure.rank:05d}.json", asdict(failure))


def read_failures(folder: Path) -> list[Failure]:
    """Return the failures that the ranks of an attempt wrote, earliest first."""
    read = (read_json(path) for path in folder.glob("failure-rank-*.json"))
    found = (_whole(Failure, value) for value in read if value is not None)
    return sorted((failure for failure in found if failure), key=lambda failure: failure.time)


def is_cascade(failure: Failure) -> bool:
    """Return True if the failure only reports that another rank has gone."""
    # A file system may say "Connection reset by peer" too.
    by_itself = failure.kind == READ_FAILURE
    return not by_itself and bool(_CASCADE.search(f"{failure.kind}: {failure.message}"))


def record_exit(folder: Path, ended: Exit) -> None:
    """Append to the attempt's ``exits.jsonl``; raises OSError when the disk refuses."""
    append_line(folder / "exits.jsonl", asdict(ended))


def read_exits(folder: Path) -> list[Exit]:
    """Return the ends of an attempt's tasks, in the order in which they were seen."""
    found = (_whole(Exit, line) for line in read_lines(folder / "exits.jsonl"))
    return [ended for ended in found if ended]


def last_words(folder: Path, rank: int) -> str | None:
    """Return why the process was ended, from its log: a message of C++ code, or of a forked rank's task."""
    text = end_of(folder / f"rank-{rank:05d}.log", _LOG_END).decode(errors="replace")
    if of_task := _OF_TASK.findall(text):
        return str(of_task[-1])
    found = _TERMINATED.search(text)
    return f"{found['kind']}: {found['what'].strip()[:500]}" if found else None


def first_log(folder: Path) -> str:
    """Return the end of the first log of an attempt's tasks (of a rank or of its launcher)."""
    first = min(folder.glob("*.log"), default=None)
    return "" if first is None else end_of(first, _LOG_END).decode(errors="replace")


def last_output(folder: Path) -> float | None:
    """Return the time of the newest output of an attempt's ranks in Unix seconds; None without output.

    Raises:
        OSError: the folder cannot be read.
    """
    with os.scandir(folder) as entries:
        logs = [
            one for one in entries if one.name.startswith("rank-") and one.name.endswith(".log")
        ]
        return max((one.stat().st_mtime for one in logs), default=None)


def record_unfinished(folder: Path) -> None:
    """Record that a script requested another start; raises OSError if the write fails."""
    make_log_folder(folder)
    (folder / _UNFINISHED).touch()


def is_unfinished(folder: Path) -> bool:
    """Return True if a rank's script requested another start."""
    return (folder / _UNFINISHED).exists()


@dataclass(frozen=True)
class HeardStop:
    """A stop signal that a rank other than rank 0 received, and the end of its script.

    ``code``: -n for signal n; None: the script had not started. ``done``: exit code 0 means finished.
    """

    cause: str
    code: int | None
    done: bool = False


def died_of_stop(code: int) -> bool:
    """Return True if this exit code means that a stop signal killed the program."""
    return code in _DIED_OF_STOP


def script_stop(
    attempt: Attempt, cause: str, code: int | None, *, saved: int | None = None, done: bool = False
) -> Stopped:
    """Return the event of a script that ended with ``code`` after a stop signal.

    Args:
        code: -n for signal n; None: the signal came before the script started.
        saved: the step that the script reported as saved after the signal.
        done: the script has finished its work.
    """
    facts: dict[str, Any] = {
        "committed": saved is not None or code == exit_codes.UNFINISHED,
        "exit_code": code,
    }
    if code is None or died_of_stop(code):
        facts["killed"] = True
    if saved is not None:
        facts["step"] = saved
    if done:
        facts["done"] = True
    return Stopped(attempt=attempt, cause=cause, **facts)


def record_heard_stop(folder: Path, rank: int, heard: HeardStop) -> None:
    """Record the stop of a rank other than rank 0; raises OSError."""
    make_log_folder(folder)
    # The ranks that end well share a file, because thousands may end at the same time.
    path = folder / (f"heard-stop-{rank:05d}.json" if heard.code else "heard-stop.json")
    if heard.code or not path.exists():
        write_json(path, asdict(heard))


def read_heard_stops(folder: Path) -> list[HeardStop]:
    """Return the stops that ranks other than rank 0 have recorded; ranks that did not end well come first."""
    found = []
    for path in sorted(folder.glob("heard-stop*.json")):
        with contextlib.suppress(TypeError):
            found.append(HeardStop(**(read_json(path) or {})))
    return sorted(found, key=lambda heard: heard.code == 0)


def stacks_path(folder: Path, rank: int) -> Path:
    """Return the file for the Python stacks of a hanging rank, which its watchdog writes."""
    return folder / f"stacks-rank-{rank:05d}.txt"


def record_hang(folder: Path, hang: Hang) -> None:
    """Write the attempt's ``hang.json``; raises OSError when the disk refuses."""
    write_json(folder / "hang.json", asdict(hang))


def read_hang(folder: Path) -> Hang | None:
    """Return the hang that ended the attempt, or None.

    If every rank was stuck in code that blocks all other threads, no record exists. The stacks that C code
    has written are then the only evidence, and they do not show which rank caused the hang.
    """
    value = read_json(folder / "hang.json")
    if value is not None and isinstance(value.get("time"), int | float):
        with contextlib.suppress(TypeError):
            return Hang(**value)
    times = []
    for path in folder.glob("stacks-rank-*.txt"):
        # A rank that ends without a hang removes its file at this moment.
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            times += [stat.st_mtime] if stat.st_size else []
    if not times:
        return None
    ranks = "1 rank" if len(times) == 1 else f"{len(times)} ranks"
    return Hang(None, None, min(times), None, f"{ranks} made no progress")


def _whole(kind: type[_Ending], value: dict[str, Any]) -> _Ending | None:
    if not isinstance(value.get("time"), int | float) or not isinstance(value.get("rank"), int):
        return None
    try:
        return kind(**value)
    except TypeError:
        return None


_PACKAGE = Path(__file__).parents[1]
_LIBRARY = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_SITE = {"site-packages", "dist-packages"}
# torch wraps an exception of a loader process: the message contains the traceback.
_IN_LOADER = re.compile(r"Caught \w+ in (?P<where>.+)\.\nOriginal Traceback")
_PRINTED = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+)', re.MULTILINE)
_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in ', re.MULTILINE)


def place_of(error: BaseException) -> tuple[str, str]:
    """Return the deepest place of ``error`` in code of neither a library nor this package.

    Returns:
        ``file:line`` with the original path, and with the path of the copy in the run directory, if the copy
        ran. Both are empty for an exception without a traceback.
    """
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if not places:
        return "", ""
    if _IN_LOADER.match(str(error)):
        places += [(found["file"], int(found["line"])) for found in _FRAME.finditer(str(error))]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    known = [(*original(file), line) for file, line in places]
    mine = [place for place in known if is_own_code(place[0])]
    file, copy, line = (mine or known)[-1]
    return f"{file}:{line}", f"{copy}:{line}" if copy else ""


def deepest_own_place(text: str) -> tuple[str, str]:
    """Return the deepest place of a printed traceback in code of neither a library nor this package.

    Returns:
        ``file:line`` with the original path, and with the path of the copy in the run directory, if the copy
        ran. Both are empty if no frame is the user's.
    """
    frames = [(*original(found["file"]), found["line"]) for found in _PRINTED.finditer(text)]
    mine = [frame for frame in frames if is_own_code(frame[0])]
    if not mine:
        return "", ""
    file, copy, line = mine[-1]
    return f"{file}:{line}", f"{copy}:{line}" if copy else ""


def headline(message: str) -> str:
    """Return the most useful line of a message: the first, or from a loader process the last."""
    lines = message.strip().splitlines()
    if not lines:
        return "no message"
    found = _IN_LOADER.match(message)
    return f"{lines[-1]} (in {found['where']})" if found else lines[0]


def traceback_of(error: BaseException) -> str:
    """Return the traceback of ``error`` with original paths, without frames of this package.

    If this package has raised the exception, its last frame stays.
    """
    trace = traceback.TracebackException.from_exception(error)
    _leave_out_package(trace)
    return "".join(trace.format())


def _leave_out_package(trace: traceback.TracebackException) -> None:
    for frame in trace.stack:
        _ = frame.line  # Read before the path changes, from the file that ran.
        frame.filename, _copy = original(frame.filename)
    *outer, last = trace.stack or [None]
    kept = [frame for frame in outer if frame and not is_package_code(frame.filename)]
    trace.stack[:] = [*kept, *([last] if last else [])]
    for cause in (trace.__cause__, trace.__context__, *(getattr(trace, "exceptions", None) or ())):
        if cause is not None:
            _leave_out_package(cause)


def original(file: str) -> tuple[str, str]:
    """Return the original of ``file``, and ``file``; for a file that is no copy: ``file`` and ""."""
    path = Path(file)
    for root in path.parents:
        if root.parent.name != "code":
            continue
        run = RunDirectory(root.parent.parent)
        code = (read_json(run.record) or {}).get("code") if run.exists() else None
        if isinstance(code, dict):
            return str(Path(str(code.get("source"))) / path.relative_to(root)), file
    return file, ""


def is_own_code(file: str) -> bool:
    """Return True if ``file`` is user code: neither a library nor this package."""
    return not (is_package_code(file) or _is_library(file))


def is_package_code(file: str) -> bool:
    """Return True if ``file`` belongs to this package and is not a built-in task."""
    # Users read and change built-in tasks like user code.
    path = Path(file)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "tasks")


def _is_library(file: str) -> bool:
    return file.startswith(("<", *_LIBRARY)) or not _SITE.isdisjoint(Path(file).parts) or file == ""
