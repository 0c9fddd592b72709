"""Processes that outlive a wrapper: `bash wrap.sh` dies of a signal on which its program saves."""

import os
import time
from collections.abc import Iterable

from hpcrun.job import exitcodes

_TICK = 0.1


def wait_for_orphans(patience: float) -> list[int]:
    """Wait until no child is left, for ``patience`` seconds at most.

    Call it when no other code waits for a child of this process. Returns the exit codes of the children
    that ended, -n for signal n.
    """
    codes: list[int] = []
    late = time.monotonic() + patience
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
        if pid:
            codes.append(os.waitstatus_to_exitcode(status))
        elif time.monotonic() >= late:
            return codes
        else:
            time.sleep(_TICK)


def code_of_all(wrapper: int, orphans: Iterable[int]) -> int:
    """Return the exit code of a script after its ``wrapper`` died of the stop signal.

    A process that outlived the wrapper and ended by itself is the program that the wrapper had started.
    """
    ended = set(orphans)
    for code in (exitcodes.UNFINISHED, exitcodes.DONE):
        if code in ended:
            return code
    return wrapper
