"""Signal handlers that set a flag and nothing else (invariant 2).

Standard library only: the worker installs them before its slow imports, because the default action
of a signal ends the process.
"""

import inspect
import os
import signal
import threading
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any


class StopReason(IntEnum):
    """Reason to stop, ordered so that a MAX reduction over ranks keeps the deciding reason.

    TERMINATE (SIGTERM: a preemption or a cancellation; its sender decides about a restart)
    outranks WARNING (SIGUSR2 or SIGUSR1, Slurm's ``--signal``: hpcrun requeues) and DEADLINE (hpcrun's
    own clock). SLOW_NODE (a slow node is to be replaced) has time until the next save, so it comes last.
    """

    NONE = 0
    SLOW_NODE = 1
    DEADLINE = 2
    WARNING = 3
    TERMINATE = 4


# NCCL may catch SIGUSR1, so SIGUSR2 warns a task. A script may want SIGUSR1 (job.warn_signal).
_REASONS: dict[int, StopReason] = {
    signal.SIGTERM: StopReason.TERMINATE,
    signal.SIGUSR1: StopReason.WARNING,
    signal.SIGUSR2: StopReason.WARNING,
}
_REASON_OF = {**_REASONS, signal.SIGINT: StopReason.TERMINATE}


class StopFlag:
    """Remembers the highest-ranking stop signal that this process has received.

    Call ``hpcrun.STOP.install()`` in the main thread before slow imports, and read ``hpcrun.STOP.reason``
    after each step.
    """

    def __init__(self) -> None:
        self._reason = StopReason.NONE
        self._pid = os.getpid()
        self._received: list[int] = []
        self._replaced: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def install(self) -> None:
        """Handle SIGTERM, SIGUSR1 and SIGUSR2, and keep the program's own handlers for :meth:`hand_over`.

        Slurm sends these signals before a time limit and at a preemption: ``--signal`` in sbatch(1), and
        ``GraceTime`` in slurm.conf(5). SIGINT keeps its default: a person at a debugger needs it.

        Raises:
            ValueError: this is not the main thread (Python's ``signal``).
        """
        self._pid = os.getpid()
        for number in _REASONS:
            before: Any = signal.signal(number, self._remember)
            if callable(before) and not _is_ours(before):
                self._replaced[number] = before
        # slurmstepd sends SIGCONT before SIGTERM; submitit would write to its log inside a handler.
        signal.signal(signal.SIGCONT, signal.SIG_DFL)

    def take_over(self) -> list[str]:
        """Replace handlers that were set after :meth:`install`, and return the names of their signals.

        A program's own handler would hide the signal, and the run would end without a save. Outside of the
        main thread, the only thread that may set handlers, the list is empty.
        """
        # None: a handler that C code has set.
        others = [
            number for number in _REASONS if signal.getsignal(number) not in (self._remember, None)
        ]
        if not others or threading.current_thread() is not threading.main_thread():
            return []
        self.install()
        return [signal.Signals(number).name for number in others]

    def take_interrupt(self) -> None:
        """Handle SIGINT like SIGTERM: Ctrl-C in torchrun's terminal reaches every rank.

        An ignored SIGINT stays ignored: the ranks were started in the background of a shell.

        Raises:
            ValueError: this is not the main thread (Python's ``signal``).
        """
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            return
        signal.signal(signal.SIGINT, self._remember)

    @property
    def reason(self) -> StopReason:
        """The highest-ranking signal so far, or NONE."""
        return self._reason

    def keep(self, number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        """Let :meth:`hand_over` call ``handler`` for the signal ``number``, as if it had been replaced."""
        self._replaced[number] = handler

    @property
    def replaced(self) -> tuple[int, ...]:
        """The signals that had a handler of the program before :meth:`install`, such as submitit's."""
        return tuple(self._replaced)

    def hand_over(self, reason: StopReason) -> None:
        """Call the handlers that :meth:`install` has replaced, for the signals of a stop that is saved.

        submitit's handler of SIGUSR2 requeues the job and ends the process. Call it in the main thread.

        Args:
            reason: the reason that the ranks have agreed on. It counts if this rank has received no signal:
                that of Slurm may have reached another rank only.

        Raises:
            SystemExit, Exception: whatever a handler raises.
        """
        due = [number for number in self._received if number in self._replaced]
        if not self._received:
            # SIGUSR2 before SIGUSR1: it is submitit's, and hpcrun's own warning.
            due = [number for number in self._replaced if _REASONS[number] is reason][-1:]
        for number in due:
            self._replaced[number](number, inspect.currentframe())

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        # Forked DataLoader workers inherit this handler and receive the signals of the whole step too.
        if os.getpid() == self._pid:
            self._reason = max(self._reason, _REASON_OF[signal.Signals(number)])
            if number not in self._received:
                self._received.append(number)


def _is_ours(handler: Any) -> bool:
    return str(getattr(handler, "__module__", "")).partition(".")[0] == "hpcrun"


STOP = StopFlag()
"""The stop flag of this process. ``install()`` handles SIGTERM, SIGUSR1 and SIGUSR2; ``reason`` is NONE,
DEADLINE, WARNING or TERMINATE, in rising order. There is only one flag, because each signal has one handler.
"""


def ignore_in_helper_process() -> None:
    """Ignore stop signals in a DataLoader worker: slurmstepd signals all processes, but only ranks decide.

    In spawned workers, the default action would otherwise end the process in the middle of an epoch.
    """
    for number in _REASONS:
        signal.signal(number, signal.SIG_IGN)


def end_helpers() -> None:
    """End this process's DataLoader workers, whatever they do, before the process itself ends.

    They ignore SIGTERM, and torch and multiprocessing send only SIGTERM before they wait: five
    seconds for each worker, and then without limit.
    """
    # torch's handler of SIGCHLD raises when a worker is killed.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kill_helpers()


def kill_helpers() -> None:
    """Send SIGKILL to the processes that this process started through multiprocessing, from any thread.

    Processes that its parent started are spared: multiprocessing's list survives a fork, and in a
    forked process it contains the parent's DataLoader workers.
    """
    import multiprocessing

    for helper in multiprocessing.active_children():
        if helper.pid is not None and _is_child(helper.pid):
            helper.kill()


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
