"""The program that kills a step's processes on its node; it imports the standard library only.

Its own step has another number. The variables of Slurm in a process's first environment name its step.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

_SAME = ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURMD_NODENAME")


def processes_of(step: str, environ: Mapping[str, str], proc: Path = Path("/proc")) -> list[int]:
    """Return the readable processes of step number ``step`` of the job and node of ``environ``."""
    own = {f"{name}={environ[name]}".encode() for name in _SAME if name in environ}
    wanted = own | {f"SLURM_STEP_ID={step}".encode()}
    found = []
    for folder in proc.glob("[0-9]*"):
        # The process has ended, or belongs to another user.
        with contextlib.suppress(OSError):
            if wanted <= set((folder / "environ").read_bytes().split(b"\0")):
                found.append(int(folder.name))
    return found


if __name__ == "__main__":
    for pid in processes_of(sys.argv[1], os.environ):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
