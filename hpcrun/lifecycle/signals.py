"""Signal handlers that set a flag and nothing else (invariant 2).

Standard library only: the worker installs them before its slow imports, because a signal that meets
the default action ends the process.
"""

import os
import signal
from enum import IntEnum
from types import FrameType


class StopReason(IntEnum):
    """Why to stop, ordered so that a MAX reduction over ranks keeps the one that decides.

    TERMINATE (SIGTERM: a preemption or a cancellation; whoever sent it decides what comes next)
    outranks WARNING (SIGUSR2 or SIGUSR1, Slurm's ``--signal``: requeue ourselves) and DEADLINE (our own
    clock).
    """

    NONE = 0
    DEADLINE = 1
    WARNING = 2
    TERMINATE = 3


# NCCL may catch SIGUSR1 for itself, so SIGUSR2 warns a task. A script may want SIGUSR1 (job.warn_signal).
_REASONS = {
    signal.SIGTERM: StopReason.TERMINATE,
    signal.SIGUSR1: StopReason.WARNING,
    signal.SIGUSR2: StopReason.WARNING,
}
_REASON_OF = {**_REASONS, signal.SIGINT: StopReason.TERMINATE}


class StopFlag:
    """Remembers the weightiest stop signal that this process has received."""

    def __init__(self) -> None:
        self._reason = StopReason.NONE
        self._pid = os.getpid()

    def install(self) -> None:
        """Take SIGTERM, SIGUSR1 and SIGUSR2, over whatever handlers were there (submitit's).

        SIGINT is left to its default: a person at a debugger wants it.
        """
        self._pid = os.getpid()
        for number in _REASONS:
            signal.signal(number, self._remember)
        # slurmstepd sends SIGCONT before SIGTERM; submitit would log on it inside a handler.
        signal.signal(signal.SIGCONT, signal.SIG_DFL)

    def take_interrupt(self) -> None:
        """Take SIGINT for SIGTERM: Ctrl-C in torchrun's terminal reaches every rank.

        What is ignored stays ignored: the ranks were started in the background of a shell.
        """
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            return
        signal.signal(signal.SIGINT, self._remember)

    @property
    def reason(self) -> StopReason:
        """The weightiest signal so far, or NONE."""
        return self._reason

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        # Forked DataLoader workers inherit this handler and get the signal of the whole step too.
        if os.getpid() == self._pid:
            self._reason = max(self._reason, _REASON_OF[signal.Signals(number)])


STOP = StopFlag()
"""The process's one flag: signals have one handler, so they have one flag."""


def ignore_in_helper_process() -> None:
    """For DataLoader workers: the step daemon signals every process, and only ranks may decide.

    Spawned ones would otherwise meet the default action and die in the middle of an epoch.
    """
    for number in _REASONS:
        signal.signal(number, signal.SIG_IGN)


def end_helpers() -> None:
    """End this process's DataLoader workers, whatever they do, before it ends itself.

    They ignore SIGTERM, which is all that torch and multiprocessing would send them before waiting: five
    seconds for each, and then without end.
    """
    # torch's handler of this signal raises when a worker is killed.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kill_helpers()


def kill_helpers() -> None:
    """Send SIGKILL to what this process started through multiprocessing, from any thread.

    Not to what its parent started: multiprocessing's list survives a fork, and holds the parent's
    DataLoader workers in a process that was forked beside them.
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
