"""tools/progress_limit.py ends a run of the tests without progress, and no slow one."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.jobs import PATIENCE

TOOL = Path(__file__).resolve().parents[2] / "tools" / "progress_limit.py"
# A test that never ends, in a worker that does not hear the interrupt.
STUCK = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print(worker.pid, flush=True)
    time.sleep(3600)
except KeyboardInterrupt:
    print("summary")
"""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests import the tool."""
    monkeypatch.syspath_prepend(str(TOOL.parent))


def limited(seconds: float, program: str) -> "subprocess.CompletedProcess[str]":
    """Run a program with the limit."""
    return subprocess.run(
        [sys.executable, str(TOOL), str(seconds), sys.executable, "-c", program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_stuck_run_ends_with_a_line() -> None:
    done = limited(0.1, "import time; time.sleep(3600)")
    assert done.returncode == 124
    assert "\nFAILED: no test has finished for 0.1 s: the tests end\n" in done.stderr


def test_a_stuck_run_prints_its_summary_and_leaves_no_process() -> None:
    from progress_limit import end

    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=-1, text=True) as runner:
        assert runner.stdout is not None
        worker = psutil.Process(int(runner.stdout.readline()))
        end(runner)
        assert runner.stdout.read() == "summary\n"
    worker.wait(PATIENCE)


def test_the_exit_code_is_that_of_the_tests() -> None:
    assert limited(3600, "raise SystemExit(5)").returncode == 5
    assert limited(3600, "import os; os.kill(os.getpid(), 15)").returncode == 143


@pytest.mark.parametrize(("pause", "expected"), [(9, 0), (12, None)])
def test_only_the_time_since_the_last_finished_test_counts(
    pause: int, expected: int | None
) -> None:
    from progress_limit import wait

    seconds = 0

    def clock() -> float:
        return seconds

    def sleep(_pause: float) -> None:
        nonlocal seconds
        seconds += 1

    code = wait(lambda: 0 if seconds >= 100 else None, lambda: seconds // pause, 10, clock, sleep)
    assert code == expected
