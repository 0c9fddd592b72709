"""The end of a job that several runs share, with substitutes for Slurm's programs."""

import os
from pathlib import Path

import pytest

from hpcrun.batch.ending import start_pack_again
from hpcrun.lifecycle.end.scheduler_view import reason_given
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.events import record_event
from hpcrun.run.io.files import read_json

from .desk import FIRST, Desk

MARK = ["hpcrun: attempt 7-0 on n1"]
JOB = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO {} ***"
SHOWN = "; [ $1 = show ] && echo 'JobId=7 JobState=RUNNING Restarts=0 '"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Desk(tmp_path)


@pytest.fixture
def runs(tmp_path: Path) -> list[RunDirectory]:
    runs = [create(tmp_path / f"00{number}", "x", {}) for number in range(2)]
    for run in runs:
        record_event(run, "opened", attempt=FIRST, executor="slurm")
        run.logs.mkdir(exist_ok=True)
        (run.logs / "pack-7.log").symlink_to(tmp_path / "batch-7.log")
    return runs


def test_the_cancellation_of_one_run_leaves_the_restart_of_the_others(
    desk: Desk, runs: list[RunDirectory]
) -> None:
    record_event(runs[0], "cancelled", attempt=FIRST)
    desk.answer("scontrol", desk.tells(*MARK, JOB.format("JOB REQUEUE")) + SHOWN)
    assert start_pack_again(runs, FIRST, None) == 0
    assert [call for call in desk.asked() if "requeue" in call] == ["scontrol requeue 7"]
    states = [(read_json(run.result) or {}).get("state") for run in runs]
    assert states == ["stopped", None]


def test_the_reason_for_the_end_of_the_job_is_that_of_each_run(
    desk: Desk, runs: list[RunDirectory]
) -> None:
    desk.log.write_text("\n".join([*MARK, JOB.format("PREEMPTION"), ""]))
    assert [reason_given(run, FIRST) for run in runs] == ["preemption", "preemption"]
