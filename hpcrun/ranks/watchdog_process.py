"""The watchdog process of each rank: it ends a rank that is stuck.

Code that holds the interpreter's lock stops every Python thread, so no thread can end such a rank. A timer
in C could, but the kernel's clocks run on while a job is suspended: the timer would end a healthy rank
as soon as the job is resumed. This process is suspended together with its rank. It counts only the
time in which both run, and reports the length of a suspension to the rank.

The process also answers `hpcrun stacks` for a rank in which all threads wait for the lock.

The rank starts this file as a program, which imports the standard library only.
"""

import contextlib
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

NOTICED = 3.0
"""Seconds; an idle process never waits this long for the processor."""
_WRITING = 1.0
"""Seconds that the rank has to write its stacks before it is killed."""
_ANSWER = 10.0
"""Seconds that the rank waits for an answer: rank and process are not resumed at the same moment."""
_DEPUTY_AFTER = 3.0
"""Seconds that the rank has to answer a request for stacks before this process has them written."""
_DEPUTY_UNTIL = 15.0
_WRITTEN = 0.2
"""Seconds without a new line after which the rank has written all its stacks."""
_OF_HANG = "hpcrun: rank "
_STACKS = signal.SIGRTMAX - 2
_SENT_TO_ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Post(NamedTuple):
    """The files by which stacks are asked for, and the words of an answer.

    ``stacks``: the file that the rank's stacks are appended to. ``pause``: seconds between two looks.
    """

    request: str
    answer: str
    stacks: str
    task: int
    host: str
    pause: float


class WatchdogProcess:
    """The rank's side. The main thread creates and closes it; one thread uses it."""

    def __init__(self, stacks: IO[str], tick: float, post: "Post | None" = None) -> None:
        """Start the process; it ends no rank before the first :meth:`postpone`.

        Args:
            stacks: the file that takes the stacks of a rank that will be ended.
            tick: seconds between two looks of the process at its clock.
            post: the files with the requests for stacks; None: the process answers none.

        Raises:
            OSError: the process cannot be started.
        """
        faulthandler.register(_STACKS, file=stacks, all_threads=True, chain=False)
        # Slurm signals every process of a step. Blocked signals stay blocked in the new program.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SENT_TO_ALL)
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", __file__, str(os.getpid()), str(tick)),
                    *map(str, post or ()),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                bufsize=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._suspended = 0.0
        # After close() no answer can come.
        self._silent = False

    def postpone(self, seconds: float) -> float:
        """End the rank after ``seconds`` of running time, unless the next call comes sooner.

        Returns the seconds for which the rank was suspended and that no earlier call returned, 0 for less
        than ``NOTICED``. If the process has ended, the rank is not ended, 0 is returned, and the first call
        writes a line to standard error.
        """
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(b"%f\n" % seconds)
            total = self._answer()
        except (OSError, ValueError):
            self._report_once()
            return 0.0
        new = total - self._suspended
        if new < NOTICED:
            return 0.0
        self._suspended = total
        return new

    def close(self) -> None:
        """End the process; the rank will not be ended."""
        self._silent = True
        with contextlib.suppress(OSError):
            self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()
        # Last: without a handler the signal that asks for stacks ends the rank.
        faulthandler.unregister(_STACKS)

    def _report_once(self) -> None:
        if self._silent:
            return
        self._silent = True
        print(
            f"hpcrun: the watchdog process {self._process.pid} of this rank has ended: hangs in C code and "
            "suspensions are no longer noticed; the run continues",
            file=sys.stderr,
            flush=True,
        )

    def _answer(self) -> float:
        """Return the newest total of suspended seconds that the process has sent."""
        assert self._process.stdout is not None
        # Not select(2), which refuses descriptors above 1,023: rank 0 of a large world has thousands.
        stream = select.poll()
        stream.register(self._process.stdout, select.POLLIN)
        received, wait = b"", _ANSWER
        while stream.poll(wait * 1000):
            read = self._process.stdout.read(4096)
            if not read:
                raise OSError("the watchdog process has ended")
            received += read
            # The answer to an earlier call may have arrived after that call returned.
            wait = 0.0 if received.endswith(b"\n") else _ANSWER
        return float(received.split()[-1]) if received else self._suspended


class RunningTime:
    """Seconds for which a process has run, and for which it was suspended, from readings of a clock."""

    def __init__(self, now: float, tick: float) -> None:
        """``now``: the clock; ``tick``: longest time between two readings while running; both in seconds."""
        self._before, self._tick = now, tick
        self.running = self.suspended = 0.0

    def look(self, now: float, *, stopped: bool = False) -> None:
        """Count the time since the last reading.

        Args:
            now: the clock in seconds.
            stopped: the watched process is stopped; the time counts as suspended.
        """
        gap, self._before = now - self._before, now
        if stopped or gap > self._tick + NOTICED:
            self.suspended += gap
        else:
            self.running += gap


class StackAnswerer:
    """Answers a request for stacks that the rank itself has not answered.

    A separate thread calls :meth:`look`: an access to a file takes minutes if a file system stalls.
    """

    def __init__(self, rank: int, post: Post) -> None:
        self._rank, self._post = rank, post
        self._asked: str | None = None
        self._since = 0.0
        self._open = False
        # The rank has received the signal, and its stacks have not appeared yet.
        self._due = False
        self._stacks = threading.Lock()

    def look(self, now: float) -> None:
        """Read the request and act if the rank is late; ``now`` is in seconds of running time."""
        asked = _id_in(self._post.request)
        if asked != self._asked:
            self._asked, self._since, self._open = asked, now, asked is not None
        waited = now - self._since
        if self._due:
            # A rank in an uninterruptible call writes late, and stacks left in the file count as a hang.
            with contextlib.suppress(OSError):
                self._take(waited)
            return
        if self._open and _is_stopped(self._rank) and not self._is_answered():
            # It would write its stacks only after its resume, when they are not expected.
            self._open = False
            with contextlib.suppress(OSError):
                self._answer("", stopped=True)
        if not self._open or waited < _DEPUTY_AFTER:
            return
        self._open = waited <= _DEPUTY_UNTIL and not self._is_answered()
        if self._open:
            os.kill(self._rank, _STACKS)
            self._due = True

    def leave_stacks(self, seconds: float) -> None:
        """Stop taking stacks, and wait ``seconds`` at most for an access in progress."""
        self._stacks.acquire(timeout=seconds)

    def _is_answered(self) -> bool:
        return bool(_id_in(self._post.answer) == self._asked)

    def _take(self, waited: float) -> None:
        """Move the stacks from their file to the answer, once the rank has written all of them."""
        if not self._stacks.acquire(blocking=False):
            return
        try:
            path = Path(self._post.stacks)
            text = path.read_text(errors="replace")
            # The rank's own watchdog writes into the same file.
            if not text or _OF_HANG in text:
                return
            time.sleep(_WRITTEN)
            if path.read_text(errors="replace") != text:
                return
            # Stacks left in the file would be mistaken for those of a hang that ended the rank.
            os.truncate(path, 0)
            self._due = False
        finally:
            self._stacks.release()
        # Before that time the rank itself may answer.
        if self._open and waited >= _DEPUTY_AFTER and not self._is_answered():
            self._open = False
            self._answer(text)

    def _answer(self, text: str, *, stopped: bool = False) -> None:
        post = self._post
        reply = {"id": self._asked, "task": post.task, "host": post.host, "dump": text}
        reply["stopped"] = stopped
        descriptor = os.open(post.answer, os.O_WRONLY | os.O_TRUNC)
        with open(descriptor, "w") as stream:  # noqa: PTH123
            json.dump(reply | {"pid": self._rank}, stream)


def _id_in(path: str) -> Any:
    """Return the id of a request or of an answer; None if there is none."""
    try:
        return json.loads(Path(path).read_text()).get("id")
    except (OSError, ValueError, AttributeError):
        return None


def _guard(rank: int, tick: float, post: Post | None) -> None:
    """Run the process's side: end ``rank`` after the seconds of running time that it gave last.

    This thread opens files in /proc only: the time of a stalled access would count as a suspension.
    """
    clock, allowed, since = RunningTime(time.monotonic(), tick), None, 0.0
    deputy = _start_deputy(rank, post, clock) if post else None
    while os.getppid() == rank:
        ready = select.select([0], [], [], min(tick, post.pause) if post else tick)[0]
        clock.look(time.monotonic(), stopped=_is_stopped(rank))
        if ready:
            orders = os.read(0, 4096)
            if not orders:
                return
            allowed, since = float(orders.split()[-1]), clock.running
            os.write(1, b"%f\n" % clock.suspended)
        elif allowed is not None and clock.running - since >= allowed:
            if deputy is not None:
                deputy.leave_stacks(_WRITING)
            os.kill(rank, _STACKS)
            time.sleep(_WRITING)
            if os.getppid() == rank:
                os.kill(rank, signal.SIGKILL)
            return


def _start_deputy(rank: int, post: Post, clock: RunningTime) -> StackAnswerer:
    """Start the thread that answers requests; it ends with the process, even during an access to a file."""
    deputy = StackAnswerer(rank, post)

    def watch() -> None:
        while True:
            deputy.look(clock.running)
            time.sleep(post.pause)

    threading.Thread(target=watch, daemon=True).start()
    return deputy


def _is_stopped(pid: int) -> bool:
    """Return True if SIGSTOP holds the process (proc(5): the state follows the name in parentheses)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


if __name__ == "__main__":
    _, _rank, _tick, *_given = sys.argv
    _post = None
    if _given:
        _request, _answer, _stacks, _task, _host, _pause = _given
        _post = Post(_request, _answer, _stacks, int(_task), _host, float(_pause))
    _guard(int(_rank), float(_tick), _post)
