"""Requests for the stacks of a job's ranks, and the ranks' answers, as files in the attempt's log folder.

A login node can reach a rank only through the run directory. There is a file for the request, and a file per
rank for its answer. All files exist before the first request, and are written in place: an NFS client asks
the server for the content of a file that it opens (close-to-open, nfs(5)), but it may not see a new name for
up to a minute.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from traceback import walk_stack
from typing import Any

from hpcrun.run.endings import node_name
from hpcrun.run.files import make_log_folder

_FOLDER, _REQUEST = "stacks-now", "request.json"
_POLLS_PER_SECOND = 50.0


class StackError(Exception):
    """The stacks of a task cannot be read; the text gives the reason."""


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

    ``rank``: None for a process that is not a rank; ``role`` says what it is. ``step`` and ``doing``:
    position in training, or None if unknown. ``idle``: seconds since the position changed.
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
    def pause(self) -> float:
        """Seconds between two polls of a rank: all ranks together poll at most 50 times per second."""
        return max(1.0, self.ranks / _POLLS_PER_SECOND)

    def answer(self, task: int) -> Path:
        """Return the file of the answer of ``task``."""
        return self.folder / f"rank-{task:05d}.json"

    def prepare(self, task: int) -> None:
        """Make the files that ``task`` reads and writes; raises OSError as ``make_log_folder`` does."""
        make_log_folder(self.logs)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for path in (self.folder / _REQUEST, self.answer(task)):
            path.touch(mode=0o600)

    def remove(self, task: int) -> None:
        """Remove the answer file of ``task`` if no request was made, and the folder with the last one."""
        with contextlib.suppress(OSError):
            if (self.folder / _REQUEST).stat().st_size == 0:
                self.answer(task).unlink()
                if [path.name for path in self.folder.iterdir()] == [_REQUEST]:
                    (self.folder / _REQUEST).unlink()
                    self.folder.rmdir()

    def ask(self) -> str:
        """Write a new request and return its id.

        Raises:
            FileNotFoundError: no rank has prepared the files.
            OSError: the disk refuses.
        """
        request_id = os.urandom(8).hex()
        _write_in_place(self.folder / _REQUEST, {"id": request_id, "time": time.time()})
        return request_id

    def asked(self) -> str | None:
        """Return the id of the newest request; None if there is none, or it is half written."""
        return _read(self.folder / _REQUEST).get("id")

    def reply(self, reply: Reply) -> None:
        """Write an answer into its existing file; raises OSError if the run was deleted."""
        _write_in_place(self.answer(reply.task), asdict(reply))

    def replies(self, request_id: str) -> dict[int, Reply]:
        """Return the present answers to a request, by task."""
        values = map(_read, self.folder.glob("rank-*.json"))
        found = [_reply(value) for value in values if value.get("id") == request_id]
        return {reply.task: reply for reply in found}


def _write_in_place(path: Path, value: dict[str, Any]) -> None:
    # No O_CREAT: a rank must not recreate a run directory that was deleted.
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    with open(descriptor, "w") as stream:  # noqa: PTH123
        json.dump(value, stream)


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a file that is written in place; empty for a partial object."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _reply(value: dict[str, Any]) -> Reply:
    def thread(one: dict[str, Any]) -> Thread:
        return Thread(one["name"], tuple(Frame(**frame) for frame in one["frames"]))

    stacks = (
        Stack(**{**one, "threads": tuple(map(thread, one["threads"]))}) for one in value["stacks"]
    )
    return Reply(**{**value, "stacks": tuple(stacks)})


class Answering:
    """Answers requests for stacks from a thread while its context is active."""

    def __init__(
        self,
        mail: Mailbox,
        task: int,
        position: Callable[[], tuple[int | None, str | None]],
        look: Callable[[], tuple[Stack, ...]],
    ) -> None:
        """Prepare to answer for ``task``.

        Args:
            position: returns the step of the training, and the name of the work in that step.
            look: returns the stacks; raises StackError.
        """
        self._mail, self._task, self._position, self._look = mail, task, position, look
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="hpcrun-stacks", daemon=True)

    def __enter__(self) -> "Answering":
        try:
            self._mail.prepare(self._task)
        except OSError as error:
            print(f"hpcrun: `hpcrun stacks` gets no answer: {error}", file=sys.stderr, flush=True)
            return self
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        # The thread may wait for an unavailable file server.
        if self._thread.is_alive():
            self._thread.join(1.0)
        self._mail.remove(self._task)

    def _answer(self) -> None:
        answered = None
        seen, since = self._position(), time.monotonic()
        while not self._over.wait(self._mail.pause):
            now = time.monotonic()
            if (position := self._position()) != seen:
                seen, since = position, now
            asked = self._mail.asked()
            if asked is None or asked == answered:
                continue
            answered = asked
            try:
                self._mail.reply(self._reply(asked, *position, now - since))
            except OSError as error:
                print(f"hpcrun: the stacks are not written: {error}", file=sys.stderr, flush=True)

    def _reply(self, asked: str, step: int | None, doing: str | None, idle: float) -> Reply:
        try:
            stacks = self._look()
        except StackError as error:
            return Reply(asked, self._task, node_name(), problem=str(error))
        moved = None if step is None else idle
        placed = (
            one if one.rank is None else replace(one, step=step, doing=doing, idle=moved)
            for one in stacks
        )
        return Reply(asked, self._task, node_name(), tuple(placed))


def own_stacks(rank: int) -> tuple[Stack, ...]:
    """Return the stacks of this process without the calling thread, the main thread first."""
    frames = sys._current_frames()
    main, mine = threading.main_thread().ident, threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        if ident != mine:
            # The line is unknown between two lines (None).
            found = [
                Frame(frame.f_code.co_filename, line or 0, frame.f_code.co_name)
                for frame, line in walk_stack(frames[ident])
            ]
            threads.append(Thread(names.get(ident, f"thread {ident}"), tuple(reversed(found))))
    return (Stack(rank, node_name(), os.getpid(), tuple(threads)),)
