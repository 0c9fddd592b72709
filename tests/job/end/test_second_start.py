"""A first start that fails before it has ranks is repeated once, on other nodes."""

import time
from pathlib import Path

import pytest

from hpcrun import slurm
from hpcrun.errors import NodeUnfit, NotDeterministic
from hpcrun.job.finalize import Classification, finalize
from hpcrun.job.opening import open_attempt
from hpcrun.job.policy import Budgets, of_script
from hpcrun.job.script_end import ScriptFailed
from hpcrun.job.second_start import start_elsewhere
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.endings import record_failure
from hpcrun.run.events import Attempt, Cause, record_event

FIRST, SECOND = Attempt("7", 0), Attempt("7", 1)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create(tmp_path / "a", "x", {})
    record_event(run, "submitted", job="7", executor="slurm")
    return run


def failed_setup(
    run: RunDirectory, attempt: Attempt, *, other_nodes: bool = True
) -> Classification:
    log = "7-0 on n1\n/tmp/slurm_script: line 9: module: command not found\n"
    return finalize(
        run, attempt, 127, Budgets(), batch_log=log, setup="module load x", other_nodes=other_nodes
    )


def test_the_first_failure_is_a_crash_and_the_second_bad_input(run: RunDirectory) -> None:
    first = failed_setup(run, FIRST)
    assert (first.cause, first.decision.restart, first.elsewhere) == (Cause.CRASH, True, True)
    assert not run.result.exists()
    second = failed_setup(run, SECOND)
    assert (second.cause, second.elsewhere) == (Cause.BAD_INPUT, False)
    assert "module: command not found" in second.line


def test_a_repeated_classification_gives_the_same_result(run: RunDirectory) -> None:
    assert failed_setup(run, FIRST) == failed_setup(run, FIRST)


def test_where_there_are_no_other_nodes_the_first_failure_is_bad_input(run: RunDirectory) -> None:
    classification = failed_setup(run, FIRST, other_nodes=False)
    assert (classification.cause, classification.elsewhere) == (Cause.BAD_INPUT, False)


def test_a_budget_without_restarts_allows_no_second_start(run: RunDirectory) -> None:
    classification = finalize(run, FIRST, 127, Budgets(crash=0), setup="false", other_nodes=True)
    assert (classification.decision.restart, classification.elsewhere) == (False, False)


def test_an_option_that_srun_does_not_know_fails_on_every_node(run: RunDirectory) -> None:
    log = "7-0 on n1\nsrun: unrecognized option '--nix'\n"
    classification = finalize(run, FIRST, 1, Budgets(), batch_log=log, other_nodes=True)
    assert (classification.cause, classification.elsewhere) == (Cause.BAD_INPUT, False)


def test_a_job_that_has_trained_stays_on_its_nodes(run: RunDirectory) -> None:
    open_attempt(run, FIRST, Budgets())
    record_event(run, "started", attempt=FIRST, step=0)
    finalize(run, FIRST, 1, Budgets())
    classification = failed_setup(run, SECOND)
    assert (classification.cause, classification.elsewhere) == (Cause.CRASH, False)


def test_a_new_job_of_the_run_has_its_own_second_start(run: RunDirectory) -> None:
    failed_setup(run, FIRST)
    failed_setup(run, SECOND)
    record_event(run, "submitted", job="8", executor="slurm")
    assert failed_setup(run, Attempt("8", 0)).elsewhere


def test_a_follow_up_job_gets_no_further_second_start(run: RunDirectory) -> None:
    assert failed_setup(run, FIRST).elsewhere
    record_event(run, "submitted", job="8", executor="slurm", continues="7")
    second = failed_setup(run, Attempt("8", 0))
    assert (second.cause, second.elsewhere) == (Cause.BAD_INPUT, False)


def test_a_job_that_continues_one_that_has_trained_is_no_bad_input(run: RunDirectory) -> None:
    open_attempt(run, FIRST, Budgets())
    finalize(run, FIRST, 1, Budgets())
    record_event(run, "submitted", job="8", executor="slurm", continues="7")
    assert failed_setup(run, Attempt("8", 0)).cause is Cause.CRASH


def opened(run: RunDirectory, attempt: Attempt, *, nodes: int = 2, script: bool = False) -> None:
    open_attempt(run, attempt, Budgets(), nodes=nodes, script=script)


def lacks(run: RunDirectory, attempt: Attempt, *ranks: int) -> None:
    """Let ``ranks``, two on each node, fail because of a missing file."""
    for rank in ranks:
        error = FileNotFoundError(2, "No such file or directory", "/scratch/train.pt")
        folder = run.attempt_logs(attempt.job, attempt.restart)
        record_failure(folder, rank, error, None, f"n{rank // 2 + 1}", bad_input=True)


def ended(
    run: RunDirectory, attempt: Attempt, code: int = 2, *, other_nodes: bool = True
) -> Classification:
    return finalize(run, attempt, code, Budgets(), other_nodes=other_nodes)


def test_a_file_missing_on_one_node_gets_one_start_on_other_nodes(run: RunDirectory) -> None:
    opened(run, FIRST)
    lacks(run, FIRST, 2, 3)
    first = ended(run, FIRST)
    assert (first.cause, first.elsewhere, first.host) == (Cause.CRASH, True, "n2")
    assert first.line.startswith("rank 2 on n2: FileNotFoundError: ")
    opened(run, SECOND)
    lacks(run, SECOND, 2)
    second = ended(run, SECOND)
    assert (second.cause, second.elsewhere) == (Cause.BAD_INPUT, False)


def test_a_file_that_all_nodes_lack_ends_the_run(run: RunDirectory) -> None:
    opened(run, FIRST)
    lacks(run, FIRST, 1, 2)
    assert (ended(run, FIRST).cause, run.result.exists()) == (Cause.BAD_INPUT, True)


@pytest.mark.parametrize(("nodes", "other_nodes"), [(1, True), (2, False)])
def test_a_file_that_is_missing_where_no_other_node_can_have_it_ends_the_run(
    run: RunDirectory, nodes: int, other_nodes: bool
) -> None:
    opened(run, FIRST, nodes=nodes)
    lacks(run, FIRST, 0)
    assert ended(run, FIRST, other_nodes=other_nodes).cause is Cause.BAD_INPUT


def test_ranks_that_only_lost_a_peer_do_not_lack_the_file(run: RunDirectory) -> None:
    opened(run, FIRST)
    lacks(run, FIRST, 0)
    folder = run.attempt_logs("7", 0)
    record_failure(folder, 2, RuntimeError("Connection closed by peer"), None, "n2")
    assert ended(run, FIRST).elsewhere


@pytest.mark.parametrize(("shared", "cause"), [(True, Cause.BAD_INPUT), (False, Cause.CRASH)])
def test_what_rank_0_refuses_may_be_of_its_node_unless_all_ranks_know_it(
    run: RunDirectory, shared: bool, cause: Cause
) -> None:
    opened(run, FIRST)
    reason = {"reason": "data.path: there is nothing at /data", "kind": "UserError"}
    record_event(run, "bad-input", attempt=FIRST, host="n1", shared=shared, **reason)
    classification = ended(run, FIRST)
    assert (classification.cause, classification.elsewhere) == (cause, not shared)
    assert classification.line.endswith("data.path: there is nothing at /data")
    assert shared or classification.line.startswith("n1: ")


def test_what_rank_0_refuses_on_every_node_ends_the_run(run: RunDirectory) -> None:
    opened(run, FIRST)
    reason = {"reason": "n1: no such interface", "kind": "NodeUnfit"}
    record_event(run, "bad-input", attempt=FIRST, host="n1", shared=False, **reason)
    folder = run.attempt_logs("7", 0)
    record_failure(folder, 2, NodeUnfit("n2: no such interface"), None, "n2", bad_input=True)
    assert ended(run, FIRST).cause is Cause.BAD_INPUT


def test_an_exit_before_the_start_without_a_word_is_tried_elsewhere(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run directory is not mounted on a node, so its rank can write no record."""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    log = "7-0 on n[1-2]\nsrun: error: n2: task 2: Exited with exit code 2\n"
    classification = finalize(run, FIRST, 2, Budgets(), batch_log=log, other_nodes=True)
    assert (classification.cause, classification.elsewhere, classification.host) == (
        Cause.CRASH,
        True,
        "n2",
    )
    assert ended(run, SECOND).cause is Cause.BAD_INPUT


def test_a_cancelled_job_is_not_tried_elsewhere(run: RunDirectory) -> None:
    opened(run, FIRST)
    record_event(run, "bad-input", attempt=FIRST, reason="no", kind="UserError", host="n1")
    record_event(run, "cancelled", attempt=FIRST)
    classification = ended(run, FIRST)
    assert (classification.cause, classification.elsewhere) == (Cause.CANCELLED, False)


def test_a_preemption_before_the_first_step_leaves_the_second_start(run: RunDirectory) -> None:
    opened(run, FIRST)
    finalize(run, FIRST, 143, Budgets(), scheduler="preemption")
    opened(run, SECOND)
    lacks(run, SECOND, 0)
    assert ended(run, SECOND).elsewhere


def test_in_a_chain_that_has_trained_a_missing_file_is_a_crash(run: RunDirectory) -> None:
    opened(run, FIRST)
    record_event(run, "started", attempt=FIRST, step=0)
    finalize(run, FIRST, 143, Budgets(), scheduler="preemption")
    for restart in (1, 2):
        again = Attempt("7", restart)
        opened(run, again)
        record_event(run, "bad-input", attempt=again, reason="no data", kind="UserError", host="n1")
        classification = ended(run, again)
        assert (classification.cause, classification.elsewhere) == (Cause.CRASH, False)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("certain", "cause"), [(False, Cause.CRASH), (True, Cause.BAD_INPUT)])
def test_what_every_node_refuses_after_a_saved_step_is_a_crash_unless_it_is_certain(
    run: RunDirectory, nodes: int, certain: bool, cause: Cause
) -> None:
    """The file server may be unavailable at a restart, or the only node may lack the mount of the data."""
    opened(run, FIRST, nodes=nodes)
    record_event(run, "started", attempt=FIRST, step=0)
    record_event(run, "saved", attempt=FIRST, step=500)
    finalize(run, FIRST, 143, Budgets(), scheduler="preemption")
    opened(run, SECOND, nodes=nodes)
    record_event(
        run,
        "bad-input",
        attempt=SECOND,
        reason="data.path: there is nothing at /data",
        kind="ErrorOnAllRanks",
        host="n1",
        shared=True,
        certain=certain,
    )
    classification = ended(run, SECOND)
    assert (classification.cause, classification.decision.restart) == (cause, not certain)


def test_a_kernel_that_is_not_deterministic_is_so_on_every_node(run: RunDirectory) -> None:
    opened(run, FIRST)
    record_failure(run.attempt_logs("7", 0), 2, NotDeterministic("no"), 3, "n2")
    assert ended(run, FIRST).cause is Cause.BAD_INPUT


def test_the_words_of_a_script_in_a_successor_of_a_job_that_worked_are_no_bad_input(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(run, FIRST, script=True)
    record_event(run, "started", attempt=FIRST)
    ends = time.time() + 90.0
    monkeypatch.setattr(time, "time", lambda: ends)
    finalize(run, FIRST, 143, of_script(Budgets()), scheduler="preemption")
    record_event(run, "submitted", job="8", executor="slurm", continues="7")
    later = Attempt("8", 0)
    opened(run, later, nodes=1, script=True)
    failure = ScriptFailed("a.py ended with exit code 2: a.py: error: unrecognized arguments: -x")
    record_failure(run.attempt_logs("8", 0), 0, failure, None, "n1")
    classification = finalize(run, later, 1, of_script(Budgets()), other_nodes=True)
    assert (classification.cause, classification.decision.restart) == (Cause.CRASH, True)


@pytest.mark.parametrize(("seconds", "cause"), [(5.0, Cause.BAD_INPUT), (90.0, Cause.CRASH)])
def test_the_words_of_a_script_are_its_own_in_its_first_minute_only(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, seconds: float, cause: Cause
) -> None:
    opened(run, FIRST, nodes=1, script=True)
    record_event(run, "started", attempt=FIRST)
    ends = time.time() + seconds
    monkeypatch.setattr(time, "time", lambda: ends)
    record_failure(run.attempt_logs("7", 0), 0, ScriptFailed("a.py: SyntaxError: bad"), None, "n1")
    assert finalize(run, FIRST, 1, of_script(Budgets()), other_nodes=True).cause is cause


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
    """Slurm shows BeginTime after a requeue, and reports only minutes later that no node fits."""
    rows = "".join(f"batch*|{node}|idle|(null)\\n" for node in living)
    shown = "JobId=7 JobState=PENDING Reason=BeginTime\n   Partition=batch ExcNodeList=(null)\n"
    for name, script in {"sinfo": f"printf '{rows}'", "scontrol": f"echo '{shown}'"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    facts = slurm.parse_show_job(shown)
    environ = {"SLURM_JOB_NODELIST": "n[1-2]"}
    assert start_elsewhere(FIRST.job, facts, environ) == left
    # The failed node is the first to be excluded.
    turned = [{"n1": "n2", "n2": "n1"}[node] for node in left]
    assert start_elsewhere(FIRST.job, facts, environ, first="n2") == turned
