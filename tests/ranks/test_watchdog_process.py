"""A stuck rank is ended after its stacks were written; a suspended rank is not ended."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hpcrun.ranks.watchdog_process import STOPPED, RunningTime, WatchdogProcess
from tests.support import jobs

RANK = """
import ctypes, resource, sys, time
from hpcrun.ranks.watchdog_process import WatchdogProcess
stacks = open(sys.argv[1], "w")
if sys.argv[2] == "many files":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (1200, hard))
    files = [open("/dev/null") for _ in range(1100)]
helper = WatchdogProcess(stacks, tick=0.2)
stuck = sys.argv[2] == "stuck"
until = time.monotonic() + 300
# After its first answer the process watches.
suspended = helper.postpone(4.0)
print("ready", flush=True)
while time.monotonic() < until:
    # A machine that starves this process makes it report short suspensions too.
    suspended += helper.postpone(4.0)
    if suspended > 4.5:
        helper.close()
        print(f"suspended {suspended:.1f}", flush=True)
        sys.exit(0)
    if stuck:
        ctypes.PyDLL(None).pause()
        ctypes.PyDLL(None).pause()
    time.sleep(0.2)
"""


def rank(folder: Path, how: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(folder / "stacks"), how],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_rank_that_holds_the_lock_is_ended_with_stack(tmp_path: Path) -> None:
    with rank(tmp_path, "stuck") as process:
        assert process.wait(jobs.PATIENCE) == -signal.SIGKILL
    assert "<string>" in (tmp_path / "stacks").read_text()


def test_a_suspension_longer_than_allowed_ends_no_rank(tmp_path: Path) -> None:
    with rank(tmp_path, "suspended") as process:
        time.sleep(1.0)
        (helper,) = children(process.pid)
        both = (process.pid, helper)
        for pid in both:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(6.0)
        for pid in both:
            os.kill(pid, signal.SIGCONT)
        printed, _ = process.communicate(timeout=jobs.PATIENCE)
    assert process.returncode == 0
    assert 4.5 < float(printed.split()[1]) < jobs.PATIENCE
    assert (tmp_path / "stacks").read_text() == ""


@pytest.mark.parametrize("how", ["stopped", "many files"])
def test_a_rank_stopped_by_itself_is_not_ended(tmp_path: Path, how: str) -> None:
    with rank(tmp_path, how) as process:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(6.0)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGCONT)
        printed, _ = process.communicate(timeout=jobs.PATIENCE)
    assert process.returncode == 0
    assert float(printed.split()[1]) > 4.5
    assert (tmp_path / "stacks").read_text() == STOPPED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_the_watchdog_outlives_signals_and_goes_with_its_rank(
    tmp_path: Path, number: signal.Signals
) -> None:
    with rank(tmp_path, "waits") as process:
        (helper,) = children(process.pid)
        os.kill(helper, number)
        time.sleep(0.5)
        assert children(process.pid) == [helper]
        process.kill()
        process.wait()
    jobs.wait_for(lambda: b"watchdog_process" not in _words(helper))


def test_the_death_of_the_watchdog_is_reported_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    # Other tests may have left children of this process.
    others = set(children(os.getpid()))
    with tempfile.TemporaryFile("w") as stacks:
        helper = WatchdogProcess(stacks, tick=0.2)
        try:
            assert helper.postpone(600.0) == 0.0
            (pid,) = set(children(os.getpid())) - others
            os.kill(pid, signal.SIGKILL)
            assert [helper.postpone(600.0) for _ in range(3)] == [0.0] * 3
        finally:
            helper.close()
    assert capfd.readouterr().err == (
        f"hpcrun: the watchdog process {pid} of this rank has ended: hangs in C code and suspensions "
        "are no longer noticed; the run continues\n"
    )


def test_a_helper_that_its_rank_has_closed_is_not_reported(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with tempfile.TemporaryFile("w") as stacks:
        helper = WatchdogProcess(stacks, tick=0.2)
        helper.close()
        assert helper.postpone(600.0) == 0.0
    assert capfd.readouterr().err == ""


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_long_gap_is_no_running_time() -> None:
    clock = RunningTime(100.0, tick=1.0)
    for now in (101.0, 102.5, 105.5):
        clock.look(now)
    assert (clock.running, clock.suspended) == (5.5, 0.0)
    clock.look(705.5)
    clock.look(706.5)
    clock.look(707.5, stopped=True)
    assert (clock.running, clock.suspended) == (6.5, 601.0)
