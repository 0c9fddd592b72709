"""Slurm's part in an end, from the recorded output of real programs."""

import os
import shlex
from pathlib import Path

import pytest

from hpcrun import slurm
from hpcrun.job.scheduler_view import (
    JobView,
    ending_of,
    reason_given,
    view_of,
    word_of,
)
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from tests.support.journal import read_events

RECORDED = Path(__file__).parents[2] / "slurm" / "recorded"
FIRST = Attempt("7", 0)
CANCELLED = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T19:48:15 ***"


def recorded(version: str, name: str) -> JobView:
    """Return the view of a recorded job, with its JSON if the version has that."""
    folder = RECORDED / version
    states = folder / f"show-{name}.json"
    base = slurm.parse_job_states(states.read_text()) if states.exists() else frozenset()
    facts = slurm.parse_show_job((folder / f"show-{name}.txt").read_text())
    return view_of(facts, base - {"COMPLETING"})


@pytest.mark.parametrize(
    ("version", "name", "word"),
    [
        ("22.05", "running", None),
        # The state is COMPLETING for every end: without a reason, the end counts as cancelled.
        ("22.05", "cancelling", "cancelled"),
        ("22.05", "cancelled", "cancelled"),
        ("22.05", "preempting-norequeue", "preemption"),
        ("22.05", "timing-out", "time-limit"),
        # Slurm has requeued the job already. The reason is in the log.
        ("22.05", "preempting", "node-failure"),
        ("22.05", "requeueing", "node-failure"),
        ("26.05", "running", None),
        ("26.05", "cancelling", "cancelled"),
        ("26.05", "cancelled", "cancelled"),
        ("26.05", "preempting-norequeue", "preemption"),
        ("26.05", "timing-out", "time-limit"),
        ("26.05", "preempting", "preemption"),
        ("26.05", "requeueing", "node-failure"),
    ],
)
def test_the_controller_gives_the_reason_for_a_jobs_end(
    version: str, name: str, word: str | None
) -> None:
    assert word_of(recorded(version, name), FIRST, "") == word


def test_the_states_under_completing_come_from_json() -> None:
    assert recorded("26.05", "cancelling").base == {"CANCELLED"}
    assert slurm.parse_job_states('{"jobs": [{"job_state": "RUNNING"}]}') == {"RUNNING"}
    for text in ("", "scontrol: unrecognized option '--json'", '{"jobs": []}', "[1]"):
        assert slurm.parse_job_states(text) == frozenset()


def test_the_controllers_fact_comes_before_the_words_of_the_log() -> None:
    ending = JobView("COMPLETING", 0, False, None, base=frozenset({"CANCELLED"}))
    requeued = CANCELLED.replace(" ***", " DUE TO JOB REQUEUE ***")
    assert word_of(ending, FIRST, requeued) == "cancelled"
    assert word_of(None, FIRST, CANCELLED) == "cancelled"


class Site:
    """A run and a scontrol that answers for its job."""

    def __init__(self, folder: Path, run: RunDirectory) -> None:
        self.folder, self.run = folder, run
        self.log = run.logs / "batch-7.log"
        self.log.write_text("hpcrun: attempt 7-0 on n1\n")

    def answers(self, words: str, late: Path | None = None) -> None:
        """Answer with ``words``, and write slurmstepd's line to ``late`` a moment later."""
        line = f"(sleep 0.2; echo {shlex.quote(CANCELLED)} >> {late}) > /dev/null 2>&1 &"
        program = self.folder / "scontrol"
        program.write_text(f"#!/bin/bash\n{line if late else ''}\n{words}\n")
        program.chmod(0o755)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Site(tmp_path, create(tmp_path / "run", "x", {}))


ENDING = "echo 'JobId=7 JobState=COMPLETING Restarts=0 EndTime=1'"


def test_a_reason_that_only_the_log_knows_is_waited_for(site: Site) -> None:
    site.answers(ENDING, late=site.log)
    found = ending_of(site.run, FIRST)
    assert CANCELLED in found.log
    assert found.word == "cancelled"


@pytest.mark.parametrize(
    ("code", "told", "word"),
    [
        ("0:9", "", "node-failure"),
        # `scancel --batch --signal=KILL`: slurmstepd reports it as the cancellation of a job.
        ("0:9", CANCELLED, "cancelled"),
        ("0:15", "", "cancelled"),
        ("143:0", "", "cancelled"),
    ],
    ids=["killed", "scancel", "terminated", "ended"],
)
def test_a_killed_batch_script_is_no_cancellation(
    site: Site, code: str, told: str, word: str
) -> None:
    site.answers(f"{ENDING.removesuffix(chr(39))} ExitCode={code}'")
    site.log.write_text(f"{site.log.read_text()}{told}\n")
    found = ending_of(site.run, FIRST, patience=0.0)
    assert found.word == word
    assert ("killed by SIGKILL" in found.why) is (word == "node-failure")


def test_a_cancellation_during_the_verdict_is_read(site: Site) -> None:
    assert reason_given(site.run, FIRST, read_events(site.run)) is None
    site.log.write_text(f"{site.log.read_text()}{CANCELLED}\n")
    assert reason_given(site.run, FIRST, read_events(site.run)) == "cancelled"


@pytest.mark.parametrize(("state", "near"), [("RUNNING", True), ("COMPLETING", False)])
def test_the_end_of_a_cancellation_is_no_time_limit(site: Site, state: str, near: bool) -> None:
    site.answers(f"echo JobId=7 JobState={state} Restarts=0 EndTime=$(date -d '5 seconds' +%FT%T)")
    assert ending_of(site.run, FIRST, lead=90.0, patience=0.0).limit_near is near


@pytest.mark.parametrize(("ago", "recent"), [(60, True), (3600, False)])
def test_a_suspension_is_recent_for_some_minutes(site: Site, ago: int, recent: bool) -> None:
    when = f"SuspendTime=$(date -d '{ago} seconds ago' +%FT%T)"
    site.answers(f"echo JobId=7 JobState=RUNNING Restarts=0 {when}")
    assert ending_of(site.run, FIRST).just_resumed is recent
