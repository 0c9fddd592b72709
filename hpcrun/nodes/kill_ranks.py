"""The processes of a step on this node, for the node's agent, whose own step has another number.

The variables of Slurm in a process's first environment name its step. A rank of the fork server has not this
environment, and ends with its task.
"""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_SAME = ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURMD_NODENAME")
_LOOK = 0.05


def processes_of(steps: Sequence[int], environ: Mapping[str, str]) -> list[int]:
    """Return the readable processes of these steps of the job and node of ``environ``."""
    own = {f"{name}={environ[name]}".encode() for name in _SAME if name in environ}
    wanted = {f"SLURM_STEP_ID={step}".encode() for step in steps}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # The process has ended, or belongs to another user.
        with contextlib.suppress(OSError):
            variables = set((folder / "environ").read_bytes().split(b"\0"))
            if own <= variables and wanted & variables:
                found.append(int(folder.name))
    return found


def children_of(process: int) -> list[int]:
    """Return the children of a process; none if the kernel does not list them."""
    with contextlib.suppress(OSError):
        return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]
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
