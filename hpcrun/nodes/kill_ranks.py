"""The processes of a step on this node, for the node's agent, whose own step has another number; its srun.

The variables of Slurm in a process's first environment name its step. A rank of the fork server has not this
environment, and ends with its task.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

import psutil

from hpcrun.slurm.notation import STEPS

_SAME = ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURMD_NODENAME")
_LOOK = 0.05


def processes_of(steps: Sequence[int], environ: Mapping[str, str]) -> list[int]:
    """Return the readable processes of these steps of the job and node of ``environ``."""
    own = {name: environ[name] for name in _SAME if name in environ}
    wanted, found = set(map(str, steps)), []
    for process in psutil.process_iter():
        # The process has ended, or belongs to another user.
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            if own.items() <= variables.items() and variables.get("SLURM_STEP_ID") in wanted:
                found.append(process.pid)
    return found


def children_of(process: int) -> list[int]:
    """Return the children of a process; none after its end."""
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(process).children()]
    return []


def kill_processes(
    steps: Sequence[int], environ: Mapping[str, str], server: int | None, seconds: float
) -> int:
    """Kill the processes of these steps and return how many are left after at most ``seconds``.

    Args:
        environ: names the job and the node.
        server: the fork server, which kills the ranks whose tasks have ended.
    """
    late = time.monotonic() + seconds
    while True:
        left = processes_of(steps, environ)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        forked = children_of(server) if server is not None else []
        if (not left and not forked) or time.monotonic() > late:
            return len(left) + len(forked)
        time.sleep(_LOOK)


def end_sruns(child: "subprocess.Popen[bytes]", seconds: float, *, ask: bool) -> None:
    """End each srun of hpcrun among the descendants of ``child``, for which another thread waits.

    Args:
        seconds: srun may end by itself until then.
        ask: send SIGTERM first, at which srun ends its step.
    """
    if ask:
        _signal_sruns(child.pid, signal.SIGTERM)
    late = time.monotonic() + seconds
    while time.monotonic() < late:
        if child.returncode is not None or not psutil.pid_exists(child.pid):
            return
        time.sleep(_LOOK)
    _signal_sruns(child.pid, signal.SIGKILL)


def _signal_sruns(parent: int, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(parent).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(word.startswith(f"--job-name={STEPS}") for word in process.cmdline()):
                    process.send_signal(number)
