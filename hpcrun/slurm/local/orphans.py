"""Processes that a task of the local cluster has started outside of its process group.

torchrun starts each rank in a new session. slurmstepd finds such processes in the container of
the step; here they are found by their parents, and by their environment once a parent has ended.
"""

import contextlib
import os
from collections.abc import Collection

import psutil


def started_apart(task: int, rank: str) -> list[psutil.Process]:
    """Return the processes that the task with pid ``task`` has started outside of its process group.

    Args:
        rank: the task's SLURM_PROCID.
    """
    with contextlib.suppress(psutil.Error):
        below = psutil.Process().children(recursive=True)
        own = {task}
        found = []
        # Parents come before their children.
        for process in below:
            if process.pid != task and (process.ppid() in own or _has_rank(process, rank)):
                own.add(process.pid)
                if _group(process.pid) not in (task, None):
                    found.append(process)
        return found
    return []


def collect_orphans(tasks: Collection[int]) -> None:
    """Take the exit codes of adopted processes that have ended; those of ``tasks`` are read elsewhere."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if process.pid not in tasks and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def _has_rank(process: psutil.Process, rank: str) -> bool:
    try:
        return process.environ().get("SLURM_PROCID") == rank
    except psutil.Error:
        return False


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
