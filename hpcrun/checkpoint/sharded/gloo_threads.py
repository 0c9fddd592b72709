"""Threads that torch's C++ code has started and Python does not know: when they rest."""

import contextlib
import time
from pathlib import Path

GLOO_WORKERS = "pt_gloo_runloop"

_BETWEEN_LOOKS = 0.001


def wait_until_idle(name: str, patience: float = 10.0) -> bool:
    """Wait until no thread of this process called ``name`` has anything to do; whether that came true.

    Between two looks the interpreter is free, for which such a thread may wait; one that has not run in
    between had no use for it. Where there is no proc(5) to look into, nothing is waited for.

    Args:
        patience: seconds until the wait is given up.
    """
    deadline, before = time.monotonic() + patience, None
    while True:
        now = _asleep(name)
        if now is not None and now == before:
            return True
        if time.monotonic() > deadline:
            return False
        before = now
        time.sleep(_BETWEEN_LOOKS)


def _asleep(name: str) -> dict[str, list[str]] | None:
    """How often each of the threads has been put to sleep so far; None while one of them is awake."""
    found = {}
    for thread in Path("/proc/self/task").glob("*"):
        # A thread may end under the look.
        with contextlib.suppress(OSError):
            if (thread / "comm").read_text().strip() != name:
                continue
            lines = (thread / "status").read_text().splitlines()
            if "State:\tS (sleeping)" not in lines:
                return None
            found[thread.name] = [line for line in lines if "ctxt_switches" in line]
    return found
