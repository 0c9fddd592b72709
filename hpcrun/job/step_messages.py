"""Srun's messages on their way to the batch log, and a quick end for a step with a failed rank.

After the first failure srun ends the step: Slurm sends SIGTERM to the other ranks, and SIGKILL after
KillWait, by default 30 s. Ranks that wait for the failed rank on a GPU cannot answer SIGTERM. Until then
Slurm passes no other signal on to the step (seen with 26.05), so the agents of the nodes kill them.
"""

import contextlib
import fcntl
import os
import re
import signal
import threading
from collections.abc import Callable

from hpcrun.job.step_process import STOP_SIGNALS

GRACE = 3.0
"""Seconds in which the other ranks may end by themselves, and record their own failures."""
# The user's set-up lines are unlikely to use this number.
_FIRST_DESCRIPTOR = 200
# 22.05 writes "srun: launch/slurm: _step_signal: Terminating StepId=12.0".
_TERMINATING = re.compile(rb"srun: (?:.* )?Terminating StepId=\S*\.(\d+)$")
# Seconds; a background process of the set-up may keep the other end open.
_DRAIN = 0.5


class StepMessages:
    """Passes on what srun writes to ``descriptor``, to standard error.

    Args:
        hasten: called in a thread with the number of a step that srun ends, if :meth:`finish` has not been
            called after ``grace`` seconds; None: nothing is called.
    """

    def __init__(self, hasten: Callable[[int], None] | None, grace: float = GRACE) -> None:
        self._hasten, self._grace = hasten, grace
        self._reading, writing = os.pipe()
        self.descriptor = fcntl.fcntl(writing, fcntl.F_DUPFD, _FIRST_DESCRIPTOR)
        os.close(writing)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def begin(self) -> None:
        """Pass messages on. The descriptor is closed here: another process has inherited it, or none will."""
        os.close(self.descriptor)
        # A thread that does not block them would take the signals for which the batch step looks.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def finish(self) -> None:
        """Return when the messages are passed on; srun has ended."""
        self._over.set()
        self._thread.join(_DRAIN)

    def _pass_on(self) -> None:
        rest = b""
        while part := os.read(self._reading, 1 << 16):
            _write(part)
            *lines, rest = (rest + part).split(b"\n")
            found = [match[1] for line in lines if (match := _TERMINATING.match(line))]
            if found and self._hasten is not None:
                arguments = (self._hasten, int(found[0]))
                threading.Thread(target=self._wait, args=arguments, daemon=True).start()
        os.close(self._reading)

    def _wait(self, hasten: Callable[[int], None], step: int) -> None:
        if not self._over.wait(self._grace):
            hasten(step)


def _write(text: bytes) -> None:
    # On a full disk the message is lost, and srun must not wait.
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(2, text) :]
