"""Marks of what a rank has reached, with times, in one file that all ranks append to."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

FILE = "RESTART_BENCH_MARKS"
"""The environment variable with the path of the file."""


def mark(what: str) -> None:
    """Append a line to the file. A write of this size is atomic."""
    who = {"rank": int(os.environ["RANK"]), "pid": os.getpid(), "host": socket.gethostname()}
    line = {"what": what, "time": time.time(), **who}
    target = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(target, json.dumps(line).encode() + b"\n")
    os.close(target)


def mark_steps() -> None:
    """Mark the end of each optimizer step of this process."""

    def stepped(*_: Any) -> None:
        mark("step")

    register_optimizer_step_post_hook(stepped)


def begun_at(pid: int) -> float:
    """Return the start of a process, in Unix seconds, to 10 ms.

    Raises:
        OSError: the process has ended.
    """
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
