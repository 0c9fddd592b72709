"""A helper process of the local cluster's controller that ends processes which outlive a killed controller.

The kernel ends the tasks with their controller (prctl(2), PR_SET_PDEATHSIG), but not the processes that a
task has started: torchrun's ranks would continue next to those of the next start. The helper waits for the
end of a pipe from the controller, and then ends every process of the job.

The controller starts this file as a program, which imports the standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "HPCRUN_LOCAL_JOB"
"""The environment variable that marks the processes of a job; its value is the job's folder."""

# A process may start another process between two searches.
_LOOKS, _PAUSE = 50, 0.1


def end_survivors_of(folder: str) -> "subprocess.Popen[bytes]":
    """Start the helper for the job of ``folder``; the returned object holds the pipe of this process.

    Raises:
        OSError: the helper cannot be started.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )


def _processes(folder: str) -> Iterator[int]:
    wanted = f"\0{MARK}={folder}\0".encode()
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            # Processes end, and processes of other users cannot be read.
            with contextlib.suppress(OSError):
                if wanted in b"\0" + (place / "environ").read_bytes():
                    yield int(place.name)


def main(folder: str) -> None:
    """Wait for the end of standard input, then end the processes of the job of ``folder``."""
    sys.stdin.buffer.read()
    for _ in range(_LOOKS):
        found = list(_processes(folder))
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE)


if __name__ == "__main__":
    main(sys.argv[1])
