#!/usr/bin/env python3
"""Runs the tests, and ends them if no test finishes for a given time. A slow run continues.

    tools/progress_limit.py SECONDS COMMAND...

The command appends a byte to the file HPCRUN_TEST_PROGRESS after each test, as ``tests/conftest.py`` does.
The exit code is that of the command; 124 if it was ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

STUCK = 124
"""Exit code of a run without progress, as of `timeout`."""
# For pytest's summary.
GRACE_S = 60.0


def wait(
    poll: Callable[[], int | None],
    finished: Callable[[], int],
    limit: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int | None:
    """Return the exit code from ``poll``; None if ``finished`` stays the same for ``limit`` seconds."""
    count, since = finished(), clock()
    while (code := poll()) is None:
        if finished() != count:
            count, since = finished(), clock()
        elif clock() - since > limit:
            return None
        sleep(0.5)
    return code


def end(process: subprocess.Popen[Any]) -> None:
    """Interrupt the process, which prints its summary; then kill it with all its descendants."""
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    process.kill()
    process.wait()
    for one in descendants:
        # Most have ended with the process.
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def main(limit: float, command: list[str]) -> int:
    """Run the command; return its exit code, or that of a run without progress."""
    with tempfile.NamedTemporaryFile(prefix="hpcrun-tests-progress-") as progress:
        file = Path(progress.name)
        process = subprocess.Popen(command, env={**os.environ, "HPCRUN_TEST_PROGRESS": str(file)})
        # A key on the terminal reaches the command too.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        code = wait(process.poll, lambda: file.stat().st_size, limit)
        if code is not None:
            return code if code >= 0 else 128 - code
        print(f"\nFAILED: no test has finished for {limit:g} s: the tests end", file=sys.stderr)
        end(process)
        return STUCK


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
