"""Causes of ends, from the records of the ranks, the watcher and the scheduler."""

import re
from pathlib import Path
from typing import cast

import pytest

from hpcrun import exit_codes
from hpcrun.diagnose.read_log import scheduler_word
from hpcrun.errors import NotDeterministic, NotTrainable
from hpcrun.job.finalize import Classification, finalize
from hpcrun.job.opening import open_attempt
from hpcrun.job.policy import Budgets
from hpcrun.job.scheduler_view import Ending, JobView, SchedulerWord, word_of
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.endings import Exit, Hang, record_exit, record_failure, record_hang
from hpcrun.run.files import read_json, write_json
from hpcrun.run.journal.events import Cause
from hpcrun.run.journal.opening import Refused, already_finished
from hpcrun.storage.store import CheckpointStore
from tests.support.journal import read_events, record_event

FIRST = Attempt("7", 0)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create(tmp_path / "a", "x", {})
    record_event(run, "submitted", job="7", executor="local")
    open_attempt(run, FIRST, Budgets())
    record_event(run, "started", attempt=FIRST, step=0)
    return run


def classified(
    run: RunDirectory, code: int, scheduler: SchedulerWord | None = None, log: str = ""
) -> Classification:
    return finalize(run, FIRST, code, Budgets(), told_by(log, scheduler))


def told_by(log: str, word: SchedulerWord | None = None) -> Ending:
    """Return the scheduler's part in an end, with the reason from its log."""
    return Ending(word or cast("SchedulerWord | None", scheduler_word(log)), log)


def raised(message: str, kind: type[Exception] = RuntimeError) -> Exception:
    try:
        raise kind(message)
    except kind as error:
        return error


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("DUE TO PREEMPTION ***", "preemption"),
        ("DUE TO TIME LIMIT ***", "time-limit"),
        ("***", "node-failure"),
    ],
)
def test_an_unrecorded_attempt_is_classified_by_slurms_words(
    run: RunDirectory, log: str, cause: str
) -> None:
    told = f"slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 {log}"
    (run.logs / "batch-7.log").write_text(
        f"hpcrun: attempt 7-0 on n1\n{told}\nhpcrun: attempt 7-1 on n1\n"
        "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T00:00:00 DUE TO JOB REQUEUE ***"
    )
    open_attempt(run, Attempt("7", 1), Budgets())
    (ended,) = [event for event in read_events(run) if event.tag == "ended"]
    assert ended.cause == cause


@pytest.mark.parametrize(
    ("view", "log", "word"),
    [
        (JobView("RUNNING", 0, True, None), "", "preemption"),
        (JobView("RUNNING", 0, False, None), "", None),
        (JobView("COMPLETING", 0, False, None), "", "cancelled"),
        (JobView("COMPLETING", 1, False, None), "", "node-failure"),
        (JobView("COMPLETING", 1, False, None), "*** JOB 7 ON n CANCELLED AT x DUE TO PREEMPTION ***",
         "preemption"),
        (None, "", None),
    ],
)  # fmt: skip
def test_a_restart_that_slurm_has_counted_needs_a_reason(
    view: JobView | None, log: str, word: str | None
) -> None:
    assert word_of(view, FIRST, log) == word


@pytest.mark.parametrize(
    ("stop", "scheduler", "cause", "restart"),
    [
        ("terminate", None, Cause.CANCELLED, False),
        ("terminate", "cancelled", Cause.CANCELLED, False),
        ("terminate", "preemption", Cause.PREEMPTION, True),
        ("warning", None, Cause.PREEMPTION, True),
        ("warning", "time-limit", Cause.TIME_LIMIT, True),
        ("deadline", None, Cause.TIME_LIMIT, True),
    ],
)
def test_an_agreed_stop_is_classified_by_its_requester(
    run: RunDirectory, stop: str, scheduler: SchedulerWord | None, cause: Cause, restart: bool
) -> None:
    record_event(run, "saved", attempt=FIRST, step=10)
    record_event(run, "stopped", attempt=FIRST, cause=stop, step=10, committed=True)
    end = classified(run, exit_codes.UNFINISHED, scheduler)
    assert (end.cause, end.decision.restart) == (cause, restart)
    assert (read_json(run.result) is None) is restart


def test_a_sigterm_during_the_job_is_no_cancellation(run: RunDirectory) -> None:
    record_event(run, "saved", attempt=FIRST, step=10)
    record_event(run, "stopped", attempt=FIRST, cause="terminate", step=10, committed=True)
    end = finalize(run, FIRST, exit_codes.UNFINISHED, Budgets(), Ending(was_not_requested=True))
    assert (end.cause, end.decision.restart) == (Cause.CRASH, True)
    assert end.line == "SIGTERM, though the job was not cancelled: stopped and saved at step 10"
    record_event(run, "cancelled", attempt=FIRST)
    end = finalize(run, FIRST, exit_codes.UNFINISHED, Budgets(), Ending(was_not_requested=True))
    assert (end.cause, end.decision.restart) == (Cause.CANCELLED, False)


def test_a_stop_whose_save_failed_is_not_requeued_blindly(run: RunDirectory) -> None:
    record_event(run, "save-failed", attempt=FIRST, step=10, reason="disk full")
    record_event(run, "stopped", attempt=FIRST, cause="warning", step=None, committed=False)
    end = classified(run, exit_codes.SAVE_FAILED)
    assert (end.cause, end.decision.restart) == (Cause.SAVE_FAILED, False)
    assert "disk full" in end.line


def commit(run: RunDirectory, step: int, owner: Attempt = FIRST) -> None:
    """Commit an empty checkpoint without an announcement."""
    store = CheckpointStore(run.checkpoints, owner.owner)
    store.commit(store.begin(step), step, [], 1, {}, lambda: None)


def test_a_commit_that_a_crash_left_unannounced_counts(run: RunDirectory) -> None:
    record_event(run, "saved", attempt=FIRST, step=10)
    commit(run, 20)
    store = CheckpointStore(run.checkpoints, "7-0")
    store.begin(30)  # No more than begun.
    end = finalize(run, FIRST, 137, Budgets(crash=0))
    assert (end.step, (read_json(run.result) or {})["step"]) == (20, 20)
    classified(run, 137)
    assert [event.step for event in read_events(run) if event.tag == "saved"] == [10, 20]


def test_an_unannounced_commit_of_a_dead_node_is_progress(run: RunDirectory) -> None:
    patient = Budgets(no_progress=1)
    commit(run, 20)
    open_attempt(run, Attempt("7", 1), patient)
    (ended,) = [event for event in read_events(run) if event.tag == "ended"]
    assert (ended.cause, ended.step) == ("node-failure", 20)
    record_event(run, "started", attempt=Attempt("7", 1), step=20)
    record_event(run, "ended", attempt=Attempt("7", 1), cause="crash", step=21)
    with pytest.raises(Refused, match="committed no new step"):
        open_attempt(run, Attempt("7", 2), patient)
    assert (read_json(run.result) or {})["step"] == 20


def test_a_checkpoint_that_cannot_be_read_stops_no_attempt(
    run: RunDirectory,
) -> None:
    commit(run, 30)
    commit(run, 40)
    manifest = run.checkpoints / "step-000000040" / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    assert classified(run, 137).step == 30
    run.checkpoints.rename(run.path / "elsewhere")
    run.checkpoints.write_text("a file")
    open_attempt(run, Attempt("7", 1), Budgets())
    finalize(run, Attempt("7", 1), 1, None)
    ended = [event for event in read_events(run) if event.tag == "ended"]
    assert [event.attempt for event in ended] == [FIRST, Attempt("7", 1)]


@pytest.mark.parametrize("kind", [NotDeterministic, NotTrainable])
def test_bad_input_of_a_single_rank_names_the_rank(
    run: RunDirectory, kind: type[NotTrainable]
) -> None:
    folder = run.attempt_logs(Attempt("7", 0))
    record_failure(folder, 1, kind("train.deterministic: no"), 3)
    record_failure(folder, 0, raised("Connection closed by peer"), 3)
    # srun kills the other ranks, and returns the highest code.
    end = classified(run, 137)
    assert end.cause is Cause.BAD_INPUT
    assert re.fullmatch(r"rank 1 on \S+: train.deterministic: no", end.line)
    assert not end.decision.restart


def test_the_killed_rank_is_the_cause_before_its_cascade(run: RunDirectory) -> None:
    folder = run.attempt_logs(Attempt("7", 0))
    folder.mkdir(parents=True)
    record_exit(folder, Exit(3, "local0", 1.0, None, 9, induced=False))
    for rank in (0, 1, 2):
        record_failure(folder, rank, raised("Connection closed by peer [127.0.0.1]"), step=41)
    end = classified(run, 137)
    assert end.cause is Cause.CRASH
    assert end.line == ("rank 3 on local0 was killed by SIGKILL (3 other ranks then failed)")
    assert end.diagnosis is not None
    assert end.diagnosis.step == 41
    assert end.decision.restart


def test_a_script_that_slurm_ends_is_not_done(
    tmp_path: Path,
) -> None:
    run = create(tmp_path / "s", "x", {})
    open_attempt(run, FIRST, Budgets(), script=True)
    told = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n"
    assert classified(run, 0, log=told).cause is Cause.CANCELLED
    assert classified(run, 0).cause is Cause.FINISHED


def test_a_failed_setup_ends_only_a_new_run(
    run: RunDirectory,
) -> None:
    log = "on n1\nslurm_script: line 17: module: command not found\n"
    again, third, new = Attempt("7", 1), Attempt("7", 2), Attempt("8", 0)
    told = finalize(run, again, 127, Budgets(), told_by(log), setup="module load x")
    assert (told.cause, told.decision.restart) == (Cause.CRASH, True)
    ended = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n"
    told = finalize(run, third, 0, Budgets(), told_by(log + ended), setup="module load x")
    assert told.cause is Cause.CANCELLED
    record_event(run, "submitted", attempt=new, executor="slurm")
    told = finalize(run, new, 127, Budgets(), told_by(log), setup="module load x")
    assert (told.cause, told.decision.restart) == (Cause.BAD_INPUT, False)
    assert told.line == "setup failed at `module load x`: module: command not found"


@pytest.mark.parametrize(
    ("after", "state", "sends"),
    [("pruned", "pruned", False), ("submitted", "cancelled", True)],
)
def test_a_pruned_run_has_its_own_state(
    run: RunDirectory, after: str, state: str, sends: bool
) -> None:
    record_event(run, "pruned")
    record_event(run, after)
    ending = Ending("cancelled", "")
    ended = finalize(run, FIRST, exit_codes.UNFINISHED, Budgets(), ending)
    assert (read_json(run.result) or {})["state"] == state
    assert ended.notification == ("cancelled" if sends else "")


@pytest.mark.parametrize("by", ["hpcrun", "scancel"])
def test_the_next_job_records_the_end_of_a_cancellation(run: RunDirectory, by: str) -> None:
    if by == "hpcrun":
        record_event(run, "cancelled", attempt=FIRST)
    else:
        (run.logs / "batch-7.log").write_text(
            "hpcrun: attempt 7-0 on n1\n"
            "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n"
        )
    record_event(run, "stopped", attempt=FIRST, step=5, cause="terminate", committed=True)
    record_event(run, "submitted", attempt=Attempt("8", 0), executor="slurm")
    open_attempt(run, Attempt("8", 0), Budgets())
    (ended,) = [event for event in read_events(run) if event.tag == "ended"]
    assert (ended.attempt, ended.cause) == (FIRST, "cancelled")
    assert not ended.restart_allowed
    assert [event.tag for event in read_events(run)][-1] == "opened"


def test_a_stale_attempt_has_a_successor_the_newest_has_none(run: RunDirectory) -> None:
    assert read_events(run).successor(FIRST) is None
    open_attempt(run, Attempt("7", 1), Budgets())
    assert read_events(run).successor(FIRST) == Attempt("7", 1)
    assert read_events(run).successor(Attempt("7", 1)) is None
    # An attempt that never opened is stale too if a newer start of its job exists.
    open_attempt(run, Attempt("7", 3), Budgets())
    assert read_events(run).successor(Attempt("7", 2)) == Attempt("7", 3)
    assert read_events(run).successor(Attempt("7", 4)) is None


def test_an_exhausted_budget_refuses_the_next_attempt(run: RunDirectory) -> None:
    for restart in range(3):
        if restart:
            open_attempt(run, Attempt("7", restart), Budgets())
        record_event(run, "ended", attempt=Attempt("7", restart), cause="crash", step=restart)
    with pytest.raises(Refused, match="3 attempts ended by themselves and committed no new step"):
        open_attempt(run, Attempt("7", 3), Budgets())
    assert (read_json(run.result) or {})["state"] == "failed"
    end = finalize(run, Attempt("7", 3), exit_codes.BAD_INPUT, Budgets())
    assert (end.cause, end.decision.restart) == (Cause.EXHAUSTED, False)


def test_a_hang_is_recorded_with_its_host_and_step(run: RunDirectory) -> None:
    folder = run.attempt_logs(Attempt("7", 0))
    folder.mkdir(parents=True)
    record_hang(folder, Hang(1, "n3", 5.0, 7, "rank 1 on n3 is behind"))
    record_failure(folder, 0, raised("Connection closed by peer"), 7)
    end = classified(run, 1)
    assert (end.cause, end.decision.restart) == (Cause.HANG, True)
    ended = read_events(run)[-1]
    assert (ended.cause, ended.host) == ("hang", "n3")
    assert ended.reason == "rank 1 on n3 is behind"


def test_a_job_that_never_opened_is_finalized_by_no_other(run: RunDirectory) -> None:
    record_event(run, "finished", attempt=FIRST, step=10)
    done = {"state": "finished"}
    write_json(run.result, done)
    end = finalize(run, Attempt("8", 0), 1, Budgets(), setup="module load x")
    assert (end.cause, end.decision.restart) == (Cause.BAD_INPUT, False)
    assert read_json(run.result) == done


def test_a_start_of_a_finished_job_keeps_the_result(run: RunDirectory) -> None:
    record_event(run, "finished", attempt=FIRST, step=10)
    done = {"state": "finished", "metrics": 1}
    write_json(run.result, done)
    again = Attempt("7", 1)
    assert already_finished(run, again)
    assert not already_finished(run, FIRST)
    # A person requests more with another job.
    assert not already_finished(run, Attempt("8", 1))
    before = len(read_events(run))
    end = finalize(run, again, 0, Budgets())
    assert (end.cause, end.decision.restart) == (Cause.FINISHED, False)
    assert (read_json(run.result), len(read_events(run))) == (done, before)
