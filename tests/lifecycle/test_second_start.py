"""A first start that fails before it has ranks is tried once more, on other nodes."""

from pathlib import Path

import pytest

from hpcrun.cluster import slurm
from hpcrun.lifecycle.history import Cause
from hpcrun.lifecycle.opening import open_attempt
from hpcrun.lifecycle.policy import Budgets
from hpcrun.lifecycle.second_start import start_elsewhere
from hpcrun.lifecycle.settle import Verdict, settle
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.events import Attempt, record_event

FIRST, SECOND = Attempt("7", 0), Attempt("7", 1)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create(tmp_path / "a", "x", {})
    record_event(run, "submitted", job="7", executor="slurm")
    return run


def failed_setup(run: RunDirectory, attempt: Attempt, *, other_nodes: bool = True) -> Verdict:
    log = "7-0 on n1\n/tmp/slurm_script: line 9: module: command not found\n"
    return settle(
        run, attempt, 127, Budgets(), batch_log=log, setup="module load x", other_nodes=other_nodes
    )


def test_the_first_failure_is_a_crash_and_the_second_bad_input(run: RunDirectory) -> None:
    first = failed_setup(run, FIRST)
    assert (first.cause, first.decision.restart, first.elsewhere) == (Cause.CRASH, True, True)
    assert not run.result.exists()
    second = failed_setup(run, SECOND)
    assert (second.cause, second.elsewhere) == (Cause.BAD_INPUT, False)
    assert "module: command not found" in second.line


def test_a_judging_that_is_done_again_comes_to_the_same_verdict(run: RunDirectory) -> None:
    assert failed_setup(run, FIRST) == failed_setup(run, FIRST)


def test_where_there_are_no_other_nodes_the_first_failure_is_bad_input(run: RunDirectory) -> None:
    verdict = failed_setup(run, FIRST, other_nodes=False)
    assert (verdict.cause, verdict.elsewhere) == (Cause.BAD_INPUT, False)


def test_a_budget_without_restarts_allows_no_second_start(run: RunDirectory) -> None:
    verdict = settle(run, FIRST, 127, Budgets(crash=0), setup="false", other_nodes=True)
    assert (verdict.decision.restart, verdict.elsewhere) == (False, False)


def test_an_option_that_srun_does_not_know_fails_on_every_node(run: RunDirectory) -> None:
    log = "7-0 on n1\nsrun: unrecognized option '--nix'\n"
    verdict = settle(run, FIRST, 1, Budgets(), batch_log=log, other_nodes=True)
    assert (verdict.cause, verdict.elsewhere) == (Cause.BAD_INPUT, False)


def test_a_job_that_has_trained_stays_on_its_nodes(run: RunDirectory) -> None:
    open_attempt(run, FIRST, Budgets())
    settle(run, FIRST, 1, Budgets())
    verdict = failed_setup(run, SECOND)
    assert (verdict.cause, verdict.elsewhere) == (Cause.CRASH, False)


def test_a_new_job_of_the_run_has_a_second_start_of_its_own(run: RunDirectory) -> None:
    failed_setup(run, FIRST)
    failed_setup(run, SECOND)
    record_event(run, "submitted", job="8", executor="slurm")
    assert failed_setup(run, Attempt("8", 0)).elsewhere


def test_a_job_that_continues_another_has_no_second_start_of_its_own(run: RunDirectory) -> None:
    assert failed_setup(run, FIRST).elsewhere
    record_event(run, "submitted", job="8", executor="slurm", continues="7")
    second = failed_setup(run, Attempt("8", 0))
    assert (second.cause, second.elsewhere) == (Cause.BAD_INPUT, False)


def test_a_job_that_continues_one_that_has_trained_is_no_bad_input(run: RunDirectory) -> None:
    open_attempt(run, FIRST, Budgets())
    settle(run, FIRST, 1, Budgets())
    record_event(run, "submitted", job="8", executor="slurm", continues="7")
    assert failed_setup(run, Attempt("8", 0)).cause is Cause.CRASH


@pytest.mark.parametrize(
    ("living", "left"),
    [
        (["n1", "n2"], []),
        (["n1", "n2", "n3"], ["n1"]),
        (["n1", "n2", "n3", "n4"], ["n1", "n2"]),
    ],
)
def test_as_many_nodes_as_the_job_needs_remain_for_the_second_start(
    run: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    living: list[str],
    left: list[str],
) -> None:
    """Slurm shows BeginTime after a requeue, and only minutes later that no node fits."""
    rows = "".join(f"batch*|{node}|idle|(null)\\n" for node in living)
    shown = "JobId=7 JobState=PENDING Reason=BeginTime\n   Partition=batch ExcNodeList=(null)\n"
    for name, script in {"sinfo": f"printf '{rows}'", "scontrol": f"echo '{shown}'"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    facts = slurm.parse_show_job(shown)
    assert start_elsewhere(run, FIRST, FIRST.job, facts, {"SLURM_JOB_NODELIST": "n[1-2]"}) == left
