"""Srun's messages on their way to the batch log, and an end for a step that fails or never begins.

After the first failure srun ends the step: Slurm sends SIGTERM to the other ranks, and SIGKILL after
KillWait, by default 30 s. Ranks that wait for the failed rank on a GPU cannot answer SIGTERM. Until then
Slurm passes no other signal on to the step (seen with 26.05), so the agents of the nodes kill them.

While the nodes of the job are busy, srun waits for them until the time limit, and says so every minute or
two. The nodes of a new job are free, unless Slurm counts them wrongly: seen with 24.11, in a job requeued
after the loss of a node, which listed two nodes and counted one. A slow prolog, container or start of the
ranks has other messages, or none.
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
BUSY = 60.0
"""Seconds from srun's first message about busy nodes, which comes after one to two minutes, to its end."""
# The user's set-up lines are unlikely to use this number.
_FIRST_DESCRIPTOR = 200
# 22.05 writes "srun: launch/slurm: _step_signal: Terminating StepId=12.0".
_TERMINATING = re.compile(rb"srun: (?:.* )?Terminating StepId=\S*\.(\d+)$")
_BUSY_NODES = re.compile(rb"srun: (?:.* )?Job \S+ step creation .*\((Requested nodes are busy)\)$")
_CREATED = re.compile(rb"srun: Step created for ")
# Seconds; a background process of the set-up may keep the other end open.
_DRAIN = 0.5


class StepMessages:
    """Passes on what srun writes to ``descriptor``, to standard error.

    Args:
        hasten: called in a thread with the number of a step that srun ends, if :meth:`finish` has not been
            called after ``grace`` seconds; None: nothing is called.
        give_up: called in a thread with srun's reason, if Slurm has created no step ``busy`` seconds after
            srun's first message about busy nodes.
    """

    def __init__(
        self,
        hasten: Callable[[int], None] | None,
        grace: float = GRACE,
        *,
        give_up: Callable[[str], None] = lambda _: None,
        busy: float = BUSY,
    ) -> None:
        self._hasten, self._grace = hasten, grace
        self._give_up, self._busy = give_up, busy
        self._waiting: threading.Timer | None = None
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
        self._stop_waiting()

    def _pass_on(self) -> None:
        rest = b""
        while part := os.read(self._reading, 1 << 16):
            _write(part)
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                self._note_creation(line)
            found = [match[1] for line in lines if (match := _TERMINATING.match(line))]
            if found and self._hasten is not None:
                arguments = (self._hasten, int(found[0]))
                threading.Thread(target=self._wait, args=arguments, daemon=True).start()
        os.close(self._reading)

    def _note_creation(self, line: bytes) -> None:
        busy = _BUSY_NODES.match(line)
        if busy and self._waiting is None:
            self._waiting = threading.Timer(self._busy, self._give_up, [busy[1].decode()])
            self._waiting.daemon = True
            self._waiting.start()
        elif _CREATED.match(line):
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()

    def _wait(self, hasten: Callable[[int], None], step: int) -> None:
        if not self._over.wait(self._grace):
            hasten(step)


def _write(text: bytes) -> None:
    # On a full disk the message is lost, and srun must not wait.
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(2, text) :]
