"""A run keeps its live job when a person submits another job for it."""

import os
from pathlib import Path

import pytest

from hpcrun import exit_codes
from hpcrun.job.ending import conclude
from hpcrun.job.opening import open_attempt
from hpcrun.job.ownership import require_own_number
from hpcrun.job.policy import Budgets
from hpcrun.job.srun import BatchJob, RanksEnd
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.files import read_json
from hpcrun.run.journal.opening import Occupied, Refused
from tests.support.journal import read_events, record_event

SECOND = Attempt("8", 0)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create(tmp_path / "a", "name: a\n", {})
    record_event(run, "submitted", attempt=Attempt("7", 0), executor="slurm")
    open_attempt(run, Attempt("7", 0), Budgets(), executor="slurm")
    return run


def slurm_says(state: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "scontrol"
    program.write_text(f"#!/bin/bash\necho 'JobId=7 JobState={state} Restarts=0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "SUSPENDED", "EXPEDITING"])
def test_a_second_job_of_a_live_run_changes_nothing(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    slurm_says(state, tmp_path, monkeypatch)
    before = read_events(run)
    with pytest.raises(Occupied, match="a: job 7 already has this run; job 8 does not start"):
        open_attempt(run, SECOND, Budgets(), executor="slurm")
    assert (read_json(run.owner) or {})["owner"] == "7-0"
    assert conclude(run, BatchJob(SECOND), RanksEnd(137)).code == exit_codes.BAD_INPUT
    assert [event.tag for event in read_events(run)[len(before) :]] == ["occupied"]
    assert not run.result.exists()


@pytest.mark.parametrize("state", ["COMPLETED", "COMPLETING", "CANCELLED", "NODE_FAIL"])
def test_a_job_continues_the_run_of_a_lost_job(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    slurm_says(state, tmp_path, monkeypatch)
    open_attempt(run, SECOND, Budgets(), executor="slurm")
    assert (read_json(run.owner) or {})["owner"] == "8-0"


def test_a_job_after_its_end_holds_nothing(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_says("RUNNING", tmp_path, monkeypatch)
    record_event(run, "ended", attempt=Attempt("7", 0), cause="cancelled", restart_allowed=False)
    open_attempt(run, SECOND, Budgets(), executor="slurm")


def test_the_next_start_of_the_same_job_asks_no_scheduler(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_says("RUNNING", tmp_path, monkeypatch)
    open_attempt(run, Attempt("7", 1), Budgets(), executor="slurm")


def test_a_number_of_another_cluster_is_another_job(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_says("RUNNING", tmp_path, monkeypatch)
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
    record_event(run, "opened", attempt=Attempt("7", 1), executor="slurm", cluster="there")
    open_attempt(run, SECOND, Budgets(), executor="slurm")


def test_a_failed_setup_next_to_a_live_job_changes_nothing(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_says("RUNNING", tmp_path, monkeypatch)
    before = read_events(run)
    assert (
        conclude(run, BatchJob(SECOND), RanksEnd(1, "module load x")).code == exit_codes.BAD_INPUT
    )
    assert [event.tag for event in read_events(run)[len(before) :]] == ["occupied"]
    assert not run.result.exists()


def test_a_job_that_owns_the_run_asks_no_second_time(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_says("COMPLETING", tmp_path, monkeypatch)
    open_attempt(run, SECOND, Budgets(), executor="slurm")
    slurm_says("PENDING", tmp_path, monkeypatch)
    open_attempt(run, Attempt("8", 1), Budgets(), executor="slurm")


def test_a_second_srun_of_an_allocation_is_refused(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_says("COMPLETING", tmp_path, monkeypatch)
    open_attempt(run, SECOND, Budgets(), executor="slurm")
    before = read_events(run)
    with pytest.raises(
        Refused, match=r"8-0 has run before .*SLURM_RESTART_COUNT=1 in front of srun"
    ):
        open_attempt(run, SECOND, Budgets(), executor="slurm")
    assert read_events(run) == before
    open_attempt(run, Attempt("8", 1), Budgets(), executor="slurm")


def test_a_job_number_of_another_cluster_is_refused(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = Attempt("9", 0)
    record_event(run, "opened", attempt=attempt, executor="slurm", cluster="one")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "one")
    require_own_number(run, attempt, read_events(run))
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "two")
    before = read_events(run)
    for refuse in (
        lambda: require_own_number(run, attempt, read_events(run)),
        lambda: open_attempt(run, attempt, Budgets(), executor="slurm"),
    ):
        with pytest.raises(
            Occupied, match=r"job 9 of cluster one already used this number.* submit this job"
        ):
            refuse()
    assert read_events(run) == before
