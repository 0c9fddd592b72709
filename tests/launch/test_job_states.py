"""A run counts as live if its job might live, whatever Slurm calls the state."""

import os
from pathlib import Path

import pytest

from hpcrun.cluster.slurm.job_states import is_over
from hpcrun.launch import jobs
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.events import Attempt, record_event
from hpcrun.run.files import write_json


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


def test_a_job_that_ended_preempted_with_a_finished_run_is_finished(
    run: RunDirectory, tmp_path: Path
) -> None:
    squeue_says("PREEMPTED", tmp_path)
    write_json(run.result, {"state": "finished"})
    now = jobs.state(run)
    assert (now.word, now.live) == ("finished", False)
    run.result.unlink()
    assert jobs.state(run).word == "failed"


@pytest.mark.parametrize(("steps", "whole"), [("7.0", False), ("7.1", False), ("none", True)])
def test_cancel_now_reaches_the_ranks_also_after_a_node_setup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: str, whole: bool
) -> None:
    """The step of the ranks is the second one there; a job without steps is cancelled as a whole."""
    calls = tmp_path / "calls"
    (tmp_path / "scancel").write_text(
        f'#!/bin/bash\necho "$*" >> {calls}\n[[ "$*" = 7 || "$*" = *" {steps}" ]]\n'
    )
    (tmp_path / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    live = jobs.RunState("running", "", True, "slurm", "7")
    monkeypatch.setattr(jobs, "state", lambda _: live)
    run = create(tmp_path / "a", "x", {})
    assert jobs.kill(run) == "job 7: killed"
    assert ("7" in calls.read_text().splitlines()) is whole
