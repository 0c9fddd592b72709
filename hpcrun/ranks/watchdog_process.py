"""The watchdog process of each rank: it ends a rank that is stuck.

Code that holds the interpreter's lock stops every Python thread, so no thread can end such a rank. A timer
in C could, but the kernel's clocks run on while a job is suspended: the timer would end a healthy rank
as soon as the job is resumed. This process is suspended together with its rank. It counts only the
time in which both run, and reports the length of a suspension to the rank.

The rank starts this file as a program, which imports the standard library only.
"""

import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

NOTICED = 3.0
"""Seconds; an idle process never waits this long for the processor."""
STOPPED = "hpcrun: stopped by SIGSTOP, so there are no stacks\n"
"""Line among the stacks of a rank that was stopped alone. A job is suspended together with this process."""
_ALONE = 1.0
"""Seconds for which a rank is stopped before the line is written: a suspension stops one after the other."""
_WRITING = 1.0
"""Seconds that the rank has to write its stacks before it is killed."""
_ANSWER = 10.0
"""Seconds that the rank waits for an answer: rank and process are not resumed at the same moment."""
_STACKS = signal.SIGRTMAX - 2
_SENT_TO_ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class WatchdogProcess:
    """The rank's side. The main thread creates and closes it; one thread uses it."""

    def __init__(self, stacks: IO[str], tick: float) -> None:
        """Start the process; it ends no rank before the first :meth:`postpone`.

        Args:
            stacks: the file that takes the stacks of a rank that will be ended.
            tick: seconds between two looks of the process at its clock.

        Raises:
            OSError: the process cannot be started.
        """
        faulthandler.register(_STACKS, file=stacks, all_threads=True, chain=False)
        # Slurm signals every process of a step. Blocked signals stay blocked in the new program.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SENT_TO_ALL)
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", __file__),
                    *(str(os.getpid()), str(tick), str(stacks.fileno())),
                ],
                pass_fds=[stacks.fileno()],
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


def _guard(rank: int, tick: float, stacks: int) -> None:
    """Run the process's side: end ``rank`` after the seconds of running time that it gave last.

    This thread opens files in /proc only: the time of a stalled access would count as a suspension. It writes
    one line about a stopped rank to the descriptor ``stacks``.
    """
    clock, allowed, since = RunningTime(time.monotonic(), tick), None, 0.0
    before, alone, written = time.monotonic(), 0.0, False
    while os.getppid() == rank:
        ready = select.select([0], [], [], tick)[0]
        now, stopped = time.monotonic(), _is_stopped(rank)
        clock.look(now, stopped=stopped)
        # A longer gap is a suspension of this process too.
        alone = alone + now - before if stopped and now - before < tick + NOTICED else 0.0
        before = now
        if alone >= _ALONE and not written:
            written = True
            with contextlib.suppress(OSError):
                os.write(stacks, STOPPED.encode())
        if ready:
            orders = os.read(0, 4096)
            if not orders:
                return
            allowed, since = float(orders.split()[-1]), clock.running
            os.write(1, b"%f\n" % clock.suspended)
        elif allowed is not None and clock.running - since >= allowed:
            os.kill(rank, _STACKS)
            time.sleep(_WRITING)
            if os.getppid() == rank:
                os.kill(rank, signal.SIGKILL)
            return


def _is_stopped(pid: int) -> bool:
    """Return True if SIGSTOP holds the process (proc(5): the state follows the name in parentheses)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


if __name__ == "__main__":
    _guard(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
