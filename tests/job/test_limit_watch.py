"""The watch that kills the ranks of a packed run shortly before the time limit."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcrun.job.scheduler_view import JobView
from hpcrun.job.step import LimitWatch
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt


@pytest.mark.parametrize(
    ("state", "seconds_left", "killed"),
    [
        ("RUNNING", 0.0, True),
        # An administrator has given more time.
        ("RUNNING", 900.0, False),
        # A canceled job, whose ranks save.
        ("COMPLETING", -5.0, False),
        ("SUSPENDED", 0.0, False),
        # No controller answers.
        (None, 0.0, False),
    ],
)
def test_only_ranks_of_this_run_are_killed_and_only_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, state: str | None, seconds_left: float, killed: bool
) -> None:
    asked, signals = list[str](), list[str]()

    def view(job: str) -> JobView | None:
        asked.append(job)
        return JobView(state, 0, False, time.time() + seconds_left) if state else None

    def run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        if command[0] == "scancel":
            signals.append(" ".join(command[1:]))
        return subprocess.CompletedProcess(
            command, 0, "7_0.batch|batch\n7_0.0|000\n7_0.1|001\n", ""
        )

    monkeypatch.setattr("hpcrun.job.step.query_job", view)
    monkeypatch.setattr("hpcrun.slurm.run", run)
    watch = LimitWatch(RunDirectory(Path("s/001")), Attempt("7_0", 0), time.time(), 60.0)
    with watch:
        deadline = time.monotonic() + 10.0
        while not (signals if killed else asked) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert watch.killed is killed
    assert asked == ["7_0"]
    assert signals == (["--signal=KILL 7_0.1"] if killed else [])
