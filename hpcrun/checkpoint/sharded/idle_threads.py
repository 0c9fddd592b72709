"""Threads of this process that must be idle before the interpreter ends."""

import contextlib
import time
from pathlib import Path

GLOO_WORKERS = "pt_gloo_runloop"

_INTERVAL = 0.001


def wait_until_idle(name: str, patience: float = 10.0) -> bool:
    """Wait until all threads of this process called ``name`` are idle.

    Between two checks the interpreter lock is free, so that a thread which needs it can run; a thread that
    has not run between two checks is idle. Without proc(5), the call does not wait.

    Args:
        patience: maximum seconds to wait.

    Returns:
        True if the threads are idle, False after ``patience`` seconds.
    """
    deadline, before = time.monotonic() + patience, None
    while True:
        now = _asleep(name)
        if now is not None and now == before:
            return True
        if time.monotonic() > deadline:
            return False
        before = now
        time.sleep(_INTERVAL)


def _asleep(name: str) -> dict[str, list[str]] | None:
    """Return the context-switch counts of the threads; None while a thread is running."""
    found = {}
    for thread in Path("/proc/self/task").glob("*"):
        # A thread may end during this check.
        with contextlib.suppress(OSError):
            if (thread / "comm").read_text().strip() != name:
                continue
            lines = (thread / "status").read_text().splitlines()
            if "State:\tS (sleeping)" not in lines:
                return None
            found[thread.name] = [line for line in lines if "ctxt_switches" in line]
    return found
