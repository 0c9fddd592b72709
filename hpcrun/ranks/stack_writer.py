"""A thread of each rank that writes the rank's Python stacks when `hpcrun stacks` asks for them."""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from hpcrun.run.endings import node_name
from hpcrun.run.stacks import Frame, Mailbox, Reply, Stack, Thread

Place = tuple[int | None, str | None]
"""The step of a training, and the name of the work in that step."""


class StackError(Exception):
    """The stacks of a task cannot be read; the text gives the reason."""


class Answering:
    """Answers requests for stacks while its context is active."""

    def __init__(
        self,
        mail: Mailbox,
        task: int,
        place: Callable[[], Place],
        look: Callable[[], tuple[Stack, ...]],
    ) -> None:
        """Prepare to answer for ``task``.

        Args:
            place: returns the position of the training.
            look: returns the stacks; raises StackError.
        """
        self._mail, self._task, self._place, self._look = mail, task, place, look
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
        seen, since = self._place(), time.monotonic()
        while not self._over.wait(self._mail.pause):
            place, now = self._place(), time.monotonic()
            if place != seen:
                seen, since = place, now
            asked = self._mail.asked()
            if asked is None or asked == answered:
                continue
            answered = asked
            reply = self._reply(asked, place, now - since)
            try:
                self._mail.reply(reply)
            except OSError as error:
                print(f"hpcrun: the stacks are not written: {error}", file=sys.stderr, flush=True)

    def _reply(self, asked: str, place: Place, idle: float) -> Reply:
        step, doing = place
        try:
            stacks = self._look()
        except StackError as error:
            return Reply(asked, self._task, node_name(), problem=str(error))
        told = tuple(
            one
            if one.rank is None
            else replace(
                one, step=step, doing=one.doing or doing, idle=None if step is None else idle
            )
            for one in stacks
        )
        return Reply(asked, self._task, node_name(), told)


def own_stacks(rank: int) -> tuple[Stack, ...]:
    """Return the stacks of this process without the calling thread, the main thread first."""
    frames = sys._current_frames()
    main, mine = threading.main_thread().ident, threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = tuple(
        Thread(names.get(ident, f"thread {ident}"), _frames(frame))
        for ident, frame in sorted(frames.items(), key=lambda item: item[0] != main)
        if ident != mine
    )
    return (Stack(rank, node_name(), os.getpid(), threads),)


def _frames(frame: FrameType | None) -> tuple[Frame, ...]:
    found = []
    while frame is not None:
        code = frame.f_code
        # The line is unknown between two lines (None).
        found.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return tuple(reversed(found))
