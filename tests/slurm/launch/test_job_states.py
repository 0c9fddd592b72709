"""A run counts as live if its job might live, whatever Slurm calls the state."""

import os
from itertools import accumulate, islice
from pathlib import Path

import pytest

from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.files import write_json
from hpcrun.slurm.answers import is_over
from hpcrun.slurm.launch import jobs, stopping
from tests.support.journal import record_event


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = create(tmp_path / "a", "x", {})
    record_event(run, "submitted", attempt=Attempt("7", 0), executor="slurm")
    return run


def squeue_says(state: str, folder: Path) -> None:
    (folder / "squeue").write_text(f"#!/bin/bash\necho '7|{state}||N/A|1:00|None'\n")
    (folder / "squeue").chmod(0o755)


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "EXPEDITING", "NEW_STATE"])
def test_a_state_that_is_not_known_is_live(run: RunDirectory, tmp_path: Path, state: str) -> None:
    squeue_says(state, tmp_path)
    assert jobs.state(run).live
    assert not is_over(state)


def test_a_preempted_job_of_a_finished_run_is_finished(run: RunDirectory, tmp_path: Path) -> None:
    squeue_says("PREEMPTED", tmp_path)
    write_json(run.result, {"state": "finished"})
    now = jobs.state(run)
    assert (now.word, now.live) == ("finished", False)
    run.result.unlink()
    assert jobs.state(run).word == "failed"


@pytest.mark.parametrize(
    ("steps", "opened", "restarts", "killed"),
    [
        ("7.batch 7.0", [0], "Restarts=0", ["--signal=KILL 7.0"]),
        ("7.extern 7.0 7.12", [0], "Restarts=0", ["--signal=KILL 7.0", "--signal=KILL 7.12"]),
        ("7.0", [0, 1], "Restarts=1", ["--signal=KILL 7.0"]),
        ("7.batch", [0], "Restarts=0", ["7"]),
        ("", [0], "Restarts=0", ["7"]),
        # The step belongs to a preflight: the batch script would continue and start the ranks.
        ("7.batch 7.0", [], "Restarts=0", ["7"]),
        ("7.batch 7.0", [0], "Restarts=1", ["7"]),
        ("7.batch 7.0", [0], "", ["7"]),
    ],
)
def test_cancel_now_kills_open_ranks_or_the_whole_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: str,
    opened: list[int],
    restarts: str,
    killed: list[str],
) -> None:
    calls = tmp_path / "calls"
    for name, line in {
        "squeue": f"printf '%s\\n' {steps}",
        "scontrol": f"echo 'JobId=7 JobName=a'; echo '   Requeue=1 {restarts}'",
        "scancel": f'echo "$*" >> {calls}',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    live = jobs.RunState("running", "", True, "slurm", "7")
    monkeypatch.setattr(stopping, "state", lambda _: live)
    run = create(tmp_path / "a", "x", {})
    for restart in opened:
        record_event(run, "opened", attempt=Attempt("7", restart), executor="slurm")
    assert stopping.kill(run) == "job 7: killed"
    assert calls.read_text().splitlines() == killed


def test_pauses_on_slurm_grow_to_a_minute() -> None:
    found = list(islice(jobs.pauses("slurm", 15.0), 20))
    assert found[0] == 15.0
    assert found == sorted(found)
    assert found[-1] == jobs.LONGEST


def test_waiting_for_an_end_asks_slurm_rarely() -> None:
    asked = [at for at in accumulate(islice(jobs.pauses("slurm", 0.2), 50)) if at < 60]
    assert len(asked) < 20
    assert asked[3] < 2
