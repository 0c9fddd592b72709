"""Orders to the controller of a job, by signal: cancel, kill, preempt, warn."""

import signal
from dataclasses import dataclass

from hpcrun.slurm.local.job_files import CANCEL, KILL, PREEMPT, WARN


@dataclass
class Orders:
    """Requests to the controller by signal; set by handlers, read by the loop."""

    cancel: bool = False
    kill: bool = False
    preempt: bool = False
    warn: bool = False

    def install(self) -> None:
        """Install the handlers."""

        def note(number: int, _frame: object) -> None:
            if number == CANCEL:
                self.cancel = True
            elif number == KILL:
                self.cancel = self.kill = True
            elif number == PREEMPT:
                self.preempt = True
            else:
                self.warn = True

        for number in (CANCEL, KILL, PREEMPT, WARN):
            signal.signal(number, note)
        # Not SIG_IGN: the tasks would inherit it, and they must receive signals from any shell, as in Slurm.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _unmoved)


def _unmoved(_number: int, _frame: object) -> None:
    """Ignore a signal that is not meant for the controller."""
