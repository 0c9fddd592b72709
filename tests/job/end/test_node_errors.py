"""An error of the input ends a run, unless an earlier start has worked: then the nodes are the cause."""

import time
from pathlib import Path

import pytest

from hpcrun.diagnose.finding import find_cause
from hpcrun.diagnose.run_lines import lines_of_attempt
from hpcrun.diagnose.script_log import ScriptError
from hpcrun.errors import NotDeterministic
from hpcrun.job.finalize import Classification, finalize
from hpcrun.job.opening import open_attempt
from hpcrun.job.policy import Budgets
from hpcrun.job.scheduler_view import Ending
from hpcrun.job.script.end import ScriptEnd, record_end
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.endings import record_failure
from hpcrun.run.journal.events import Cause
from hpcrun.run.journal.state import State
from tests.journal import record_event

FIRST, SECOND = Attempt("7", 0), Attempt("7", 1)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create(tmp_path / "a", "x", {})
    record_event(run, "submitted", job="7", executor="slurm")
    return run


def failed_setup(run: RunDirectory, attempt: Attempt) -> Classification:
    log = "7-0 on n1\n/tmp/slurm_script: line 9: module: command not found\n"
    return finalize(run, attempt, 127, Budgets(), Ending(log=log), setup="module load x")


def test_a_repeated_classification_gives_the_same_result(run: RunDirectory) -> None:
    assert failed_setup(run, FIRST) == failed_setup(run, FIRST)


def test_an_unknown_option_of_srun_fails_on_every_node(run: RunDirectory) -> None:
    log = "7-0 on n1\nsrun: unrecognized option '--nix'\n"
    classification = finalize(run, FIRST, 1, Budgets(), Ending(log=log))
    assert classification.cause is Cause.BAD_INPUT


def test_a_job_that_has_trained_stays_on_its_nodes(run: RunDirectory) -> None:
    open_attempt(run, FIRST, Budgets())
    record_event(run, "started", attempt=FIRST, step=0)
    finalize(run, FIRST, 1, Budgets())
    classification = failed_setup(run, SECOND)
    assert classification.cause is Cause.CRASH


def test_a_job_that_continues_a_training_is_no_bad_input(run: RunDirectory) -> None:
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
        folder = run.attempt_logs(attempt)
        record_failure(folder, rank, error, None, f"n{rank // 2 + 1}", bad_input=True)


def ended(run: RunDirectory, attempt: Attempt, code: int = 2) -> Classification:
    return finalize(run, attempt, code, Budgets())


def test_a_file_that_all_nodes_lack_ends_the_run(run: RunDirectory) -> None:
    opened(run, FIRST)
    lacks(run, FIRST, 1, 2)
    assert (ended(run, FIRST).cause, run.result.exists()) == (Cause.BAD_INPUT, True)


def test_after_a_training_a_missing_file_is_a_crash(run: RunDirectory) -> None:
    opened(run, FIRST)
    record_event(run, "started", attempt=FIRST, step=0)
    finalize(run, FIRST, 143, Budgets(), Ending("preemption"))
    for restart in (1, 2):
        again = Attempt("7", restart)
        opened(run, again)
        record_event(run, "bad-input", attempt=again, reason="no data", kind="UserError", host="n1")
        classification = ended(run, again)
        assert classification.cause is Cause.CRASH


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("certain", "cause"), [(False, Cause.CRASH), (True, Cause.BAD_INPUT)])
def test_an_uncertain_refusal_after_a_save_is_a_crash(
    run: RunDirectory, nodes: int, certain: bool, cause: Cause
) -> None:
    """The file server may be unavailable at a restart, or the only node may lack the mount of the data."""
    opened(run, FIRST, nodes=nodes)
    record_event(run, "started", attempt=FIRST, step=0)
    record_event(run, "saved", attempt=FIRST, step=500)
    finalize(run, FIRST, 143, Budgets(), Ending("preemption"))
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


def test_a_nondeterministic_kernel_is_so_on_every_node(run: RunDirectory) -> None:
    opened(run, FIRST)
    record_failure(run.attempt_logs(Attempt("7", 0)), 2, NotDeterministic("no"), 3, "n2")
    assert ended(run, FIRST).cause is Cause.BAD_INPUT


def test_a_successor_s_script_words_are_no_bad_input(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(run, FIRST, script=True)
    record_event(run, "started", attempt=FIRST)
    ends = time.time() + 90.0
    monkeypatch.setattr(time, "time", lambda: ends)
    finalize(run, FIRST, 143, Budgets(script=True), Ending("preemption"))
    record_event(run, "submitted", job="8", executor="slurm", continues="7")
    later = Attempt("8", 0)
    opened(run, later, nodes=1, script=True)
    usage = ScriptError(last_line="a.py: error: unrecognized arguments: -x", usage=True)
    record_end(run.attempt_logs(Attempt("8", 0)), 0, ScriptEnd(["a.py"], 2, usage), None)
    classification = finalize(run, later, 1, Budgets(script=True))
    assert (classification.cause, classification.decision.restart) == (Cause.CRASH, True)


@pytest.mark.parametrize(
    ("said", "code", "seconds", "cause"),
    [
        ("srun: error: Requested node configuration is not available", 1, 5.0, Cause.BAD_INPUT),
        ("rendezvous: environment variable RANK expected, but not set", 1, 5.0, Cause.BAD_INPUT),
        # The script may have survived the message for long.
        ("srun: error: Requested node configuration is not available", 1, 90.0, Cause.CRASH),
        ("srun: error: Requested node configuration is not available", -9, 5.0, Cause.CRASH),
        ("srun: error: Node failure on n1", 1, 5.0, Cause.CRASH),
    ],
)
def test_what_doctor_calls_hopeless_is_not_started_again(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    code: int,
    seconds: float,
    cause: Cause,
) -> None:
    opened(run, FIRST, nodes=1, script=True)
    ends = time.time() + seconds
    monkeypatch.setattr(time, "time", lambda: ends)
    logs = run.attempt_logs(FIRST)
    record_end(logs, 1, ScriptEnd(["a.sh"], code, ScriptError(last_line="bye")), None)
    (logs / "rank-00001.log").write_text(f"begins\n{said}\nbye\n")
    found = finalize(run, FIRST, 1, Budgets(script=True))
    assert (found.cause, found.decision.restart) == (cause, cause is Cause.CRASH), found.line
    named = find_cause(lines_of_attempt(run, FIRST, State(())))
    assert (named is not None and named.retry == "never") or cause is Cause.CRASH


MISSING = ScriptError("FileNotFoundError", "[Errno 2] No such file: 'a'", "/me/a.py:3")
REFUSED = ScriptError("hpcrun.errors.UserError", "loader: is a list", "/me/a.py:3")


@pytest.mark.parametrize(
    ("error", "seconds", "saved", "cause"),
    [
        (MISSING, 5.0, False, Cause.BAD_INPUT),
        # A file server may be away.
        (MISSING, 90.0, False, Cause.CRASH),
        (MISSING, 5.0, True, Cause.CRASH),
        (ScriptError("SyntaxError", "bad", "/me/a.py:3"), 5.0, False, Cause.BAD_INPUT),
        # hpcrun refuses the same call at any time.
        (REFUSED, 5.0, False, Cause.BAD_INPUT),
        (REFUSED, 9000.0, True, Cause.BAD_INPUT),
        (ScriptError("hpcrun.errors.ClusterError", "no free port"), 5.0, False, Cause.CRASH),
    ],
)
def test_mistakes_of_a_script_count_until_it_works(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    error: ScriptError,
    seconds: float,
    saved: bool,
    cause: Cause,
) -> None:
    opened(run, FIRST, nodes=1, script=True)
    record_event(run, "started", attempt=FIRST)
    if saved:
        record_event(run, "saved", attempt=FIRST, step=7)
    ends = time.time() + seconds
    monkeypatch.setattr(time, "time", lambda: ends)
    record_end(run.attempt_logs(FIRST), 3, ScriptEnd(["a.py"], 1, error), None)
    found = finalize(run, FIRST, 1, Budgets(script=True))
    assert (found.cause, found.decision.restart) == (cause, cause is Cause.CRASH)
    assert error.message in found.line
    assert error.where in found.line
