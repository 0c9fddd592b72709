"""Requests for the stacks of a job's ranks, and the ranks' answers, as files in the attempt's log folder.

A login node can reach a rank only through the run directory. There is a file for the request, and a file per
rank for its answer. All files exist before the first request, and are written in place: an NFS client asks
the server for the content of a file that it opens (close-to-open, nfs(5)), but it may not see a new name for
up to a minute.
"""

import contextlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.run.files import make_log_folder

_FOLDER, _REQUEST = "stacks-now", "request.json"
# Polls per second of all ranks together; the helper processes poll at the same rate.
_PER_SECOND = 50.0
_FAULT_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


STOPPED = "stopped by SIGSTOP or a debugger"
"""The activity of a process whose state in /proc is T (proc(5))."""

SPAWNED = "spawned by multiprocessing"
"""The role of a process that torch.multiprocessing.spawn or a launcher has started as a rank."""


@dataclass(frozen=True)
class Frame:
    """A line of code in execution: its file, its number, and the function."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Thread:
    """The stack of a thread, from the outermost to the innermost call."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Stack:
    """The threads of a process, the main thread first.

    ``rank``: None for a process that is not a rank, such as a launcher. ``role``: a name for such a process.
    ``step`` and ``doing``: position in training, or None if unknown. ``idle``: seconds since the position
    changed.
    """

    rank: int | None
    host: str
    pid: int
    threads: tuple[Thread, ...]
    step: int | None = None
    doing: str | None = None
    idle: float | None = None
    role: str | None = None


@dataclass(frozen=True)
class Reply:
    """The answer of one task to the request ``id``. ``problem``: the reason if it has no stacks."""

    id: str
    task: int
    host: str
    stacks: tuple[Stack, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Mailbox:
    """The request and answer files of an attempt."""

    logs: Path
    ranks: int = field(default=1, compare=False)

    @property
    def folder(self) -> Path:
        """Folder of the request and of the answers."""
        return self.logs / _FOLDER

    @property
    def request(self) -> Path:
        """File of the newest request; empty before the first request."""
        return self.folder / _REQUEST

    @property
    def pause(self) -> float:
        """Seconds between two polls of a rank: all ranks together poll at most 50 times per second."""
        return max(1.0, self.ranks / _PER_SECOND)

    def answer(self, task: int) -> Path:
        """Return the file of the answer of ``task``."""
        return self.folder / f"rank-{task:05d}.json"

    def prepare(self, task: int) -> None:
        """Make the files that ``task`` reads and writes; raises OSError as ``make_log_folder`` does."""
        make_log_folder(self.logs)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for path in (self.request, self.answer(task)):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))

    def remove(self, task: int) -> None:
        """Remove the files of ``task`` if no request was made; answers stay."""
        with contextlib.suppress(OSError):
            if self.request.stat().st_size == 0:
                self.answer(task).unlink()
        with contextlib.suppress(OSError):
            if [path.name for path in self.folder.iterdir()] == [_REQUEST]:
                self.request.unlink()
                self.folder.rmdir()

    def ask(self) -> str:
        """Write a new request and return its id.

        Raises:
            FileNotFoundError: no rank has prepared the files.
            OSError: the disk refuses.
        """
        word = os.urandom(8).hex()
        _write_in_place(self.request, {"id": word, "time": time.time()})
        return word

    def asked(self) -> str | None:
        """Return the id of the newest request; None if there is none, or it is half written."""
        found = _read(self.request)
        word = (found or {}).get("id")
        return word if isinstance(word, str) else None

    def reply(self, reply: Reply) -> None:
        """Write an answer into its existing file; raises OSError if the run was deleted."""
        _write_in_place(self.answer(reply.task), asdict(reply))

    def replies(self, word: str) -> dict[int, Reply]:
        """Return the present answers to the request ``word``, by task."""
        found = {}
        for path in self.folder.glob("rank-*.json"):
            value = _read(path)
            if value is not None and value.get("id") == word:
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    reply = _reply(value)
                    found[reply.task] = reply
        return found

    def tasks(self) -> list[int]:
        """Return the tasks that can answer, or could before they ended."""
        words = (path.stem.removeprefix("rank-") for path in self.folder.glob("rank-*.json"))
        return sorted(int(word) for word in words if word.isdigit())


def _write_in_place(path: Path, value: dict[str, Any]) -> None:
    # No O_CREAT: a rank must not recreate a run directory that was deleted.
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    with open(descriptor, "w", errors="backslashreplace") as stream:  # noqa: PTH123
        json.dump(value, stream)


def _read(path: Path) -> dict[str, Any] | None:
    """Return the object in a file that is written in place; None for a partial object."""
    try:
        value = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def parse_dump(text: str) -> tuple[Thread, ...]:
    """Return the threads in the text that faulthandler writes, the main thread first.

    faulthandler begins with the newest thread, and with the innermost call of each.
    """
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        found = _FAULT_FRAME.fullmatch(line)
        if found and threads:
            frame = Frame(found["file"], int(found["line"]), found["function"])
            threads[-1][1].insert(0, frame)
        elif line.startswith(("Thread 0x", "Current thread 0x")):
            threads.append((line.split(" (most")[0].removeprefix("Current ").lower(), []))
    return tuple(Thread(name, tuple(frames)) for name, frames in reversed(threads))


def _reply(value: dict[str, Any]) -> Reply:
    if "dump" in value:
        # The answer is from the rank's helper process: no Python thread of the rank can run.
        task, host, threads = value["task"], value["host"], parse_dump(value["dump"])
        doing = STOPPED if value.get("stopped") else "in code that holds Python's lock"
        return Reply(
            value["id"], task, host, (Stack(task, host, value["pid"], threads, None, doing),)
        )
    stacks = tuple(
        Stack(**{**one, "threads": tuple(_thread(thread) for thread in one["threads"])})
        for one in value["stacks"]
    )
    return Reply(**{**value, "stacks": stacks})


def _thread(value: dict[str, Any]) -> Thread:
    return Thread(value["name"], tuple(Frame(**frame) for frame in value["frames"]))
