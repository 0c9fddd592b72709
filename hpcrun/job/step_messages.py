"""Srun's messages on their way to the batch log, and a quick end for a step with a failed rank.

After the first failure srun ends the step: Slurm sends SIGTERM to the other ranks, and SIGKILL after
KillWait, by default 30 s. Ranks that wait for the failed rank on a GPU cannot answer SIGTERM. Until then
Slurm passes no other signal on to the step (seen with 26.05), so a second, overlapping step kills them.
"""

import contextlib
import fcntl
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping

from hpcrun import slurm
from hpcrun.job import kill_ranks
from hpcrun.job.stop_signals import STOP_SIGNALS
from hpcrun.slurm.notation import expand

GRACE = 3.0
"""Seconds in which the other ranks may end by themselves, and record their own failures."""
# The user's set-up lines are unlikely to use this number.
_FIRST_DESCRIPTOR = 200
# 22.05 writes "srun: launch/slurm: _step_signal: Terminating StepId=12.0".
_TERMINATING = re.compile(rb"srun: (?:.* )?Terminating StepId=\S*\.(\d+)$")
# Seconds; a background process of the set-up may keep the other end open.
_DRAIN = 0.5
_TIMEOUT = 20.0


class StepMessages:
    """Passes on what srun writes to ``descriptor``, to standard error.

    Args:
        hasten: called in a thread with the number of a step that srun ends, if :meth:`finish` has not been
            called after ``grace`` seconds; None: nothing is called.
    """

    def __init__(self, hasten: Callable[[str], None] | None, grace: float = GRACE) -> None:
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
                arguments = (self._hasten, found[0].decode())
                threading.Thread(target=self._wait, args=arguments, daemon=True).start()
        os.close(self._reading)

    def _wait(self, hasten: Callable[[str], None], step: str) -> None:
        if not self._over.wait(self._grace):
            hasten(step)


def _write(text: bytes) -> None:
    # On a full disk the message is lost, and srun must not wait.
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(2, text) :]


def kill_step(step: str, environ: Mapping[str, str]) -> None:
    """Kill the processes of a step on its nodes; what remains gets Slurm's SIGKILL after KillWait.

    Args:
        step: its number.
        environ: the environment of the batch script, with the nodes of the step.
    """
    print("hpcrun: kills the ranks that do not answer SIGTERM", flush=True)
    done = slurm.run(kill_step_command(step, environ), _TIMEOUT, _without_requests(environ))
    if done.returncode != 0:
        words = " ".join(done.stderr.split()) or f"srun ended with {done.returncode}"
        print(f"hpcrun: they are not killed before KillWait: {words}", file=sys.stderr, flush=True)


def kill_step_command(step: str, environ: Mapping[str, str]) -> list[str]:
    """Return the command that kills the processes of a step on the nodes of ``environ``."""
    hosts = environ["SLURM_JOB_NODELIST"]
    count = len(expand(hosts))
    return [
        *("srun", f"--jobid={environ['SLURM_JOB_ID']}", "--overlap", "--no-kill", "--mpi=none"),
        *(f"--nodes={count}", f"--nodelist={hosts}", f"--ntasks={count}", "--ntasks-per-node=1"),
        *("--mem=0", "--cpu-bind=none", "--kill-on-bad-exit=0", "--job-name=hpcrun-kill"),
        *(sys.executable, "-I", "-S", kill_ranks.__file__, step),
    ]


def _without_requests(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables by which srun would request what the ranks have."""
    kept = {"SLURM_CONF"}
    return {
        name: value
        for name, value in environ.items()
        if name in kept or not name.startswith(("SLURM_", "SRUN_"))
    }
