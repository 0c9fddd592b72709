"""The request for another start, with programs that answer as Slurm's did and note what they were asked."""

import os
import shlex
import time
from pathlib import Path

import pytest

from hpcrun.cli.settle import _limit_near
from hpcrun.diagnose.causes import scheduler_word
from hpcrun.lifecycle.scheduler import JobView, end_of, requeue
from hpcrun.run.events import Attempt

FIRST = Attempt("7", 0)
CANCELLED = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T19:48:15 ***"
REQUEUED = (
    "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T19:48:16 DUE TO JOB REQUEUE ***"
)


class Desk:
    """A job's batch log and the programs of a Slurm that knows the job."""

    def __init__(self, folder: Path, state: str = "RUNNING") -> None:
        self.log, self.calls = folder / "batch-7.log", folder / "calls"
        self.log.touch()
        self.calls.touch()
        self.folder = folder
        self.answer("scancel", "")
        self.answer("scontrol", f"[ $1 = show ] && echo 'JobId=7 JobState={state} Restarts=0 '")

    def answer(self, program: str, script: str) -> None:
        calls = shlex.quote(str(self.calls))
        path = self.folder / program
        path.write_text(f'#!/bin/bash\necho "{program} $*" >> {calls}\n{script}\ntrue\n')
        path.chmod(0o755)

    def tells(self, *lines: str) -> str:
        """The shell's words that write these to the batch log."""
        return "; ".join(
            f"echo {shlex.quote(line)} >> {shlex.quote(str(self.log))}" for line in lines
        )

    def word(self) -> str | None:
        return scheduler_word(self.log.read_text())

    def requeue(self) -> str:
        return requeue(FIRST, pytest.fail, self.word, patience=0.3)

    def asked(self) -> list[str]:
        return [call for call in self.calls.read_text().splitlines() if " show " not in call]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Desk(tmp_path)


def test_a_job_that_is_being_cancelled_is_not_requeued(desk: Desk) -> None:
    desk.answer(
        "scontrol",
        f"{desk.tells(CANCELLED)}; echo 'JobId=7 JobState=COMPLETING Restarts=0 '",
    )
    assert desk.requeue() == "cancelled"
    assert desk.asked() == []


def test_a_cancellation_that_the_requeue_has_undone_is_done_again(desk: Desk) -> None:
    met = f"[ $1 = requeue ] && {{ {desk.tells(CANCELLED, REQUEUED)}; }}"
    desk.answer("scontrol", f"[ $1 = show ] && echo 'JobId=7 JobState=RUNNING Restarts=0 '; {met}")
    assert desk.requeue() == "cancelled"
    assert desk.asked() == ["scontrol requeue 7", "scancel 7"]


def test_a_requeue_that_met_nobody_is_left_to_slurm(desk: Desk) -> None:
    met = f"[ $1 = requeue ] && {{ {desk.tells(REQUEUED)}; }}"
    desk.answer("scontrol", f"[ $1 = show ] && echo 'JobId=7 JobState=RUNNING Restarts=0 '; {met}")
    assert desk.requeue() == "requeued"
    assert desk.asked() == ["scontrol requeue 7"]


def test_the_reason_of_an_end_that_has_just_come_is_waited_for(desk: Desk) -> None:
    late = f"(sleep 0.2; {desk.tells(CANCELLED)}) > /dev/null 2>&1 &"
    desk.answer("scontrol", f"echo 'JobId=7 JobState=COMPLETING Restarts=0 EndTime=1'; {late}")
    view, word = end_of(FIRST, desk.log.read_text)
    assert (view and view.state, word) == ("COMPLETING", "cancelled")


def test_it_is_waited_for_also_where_the_controller_does_not_answer_any_more(desk: Desk) -> None:
    late = f"(sleep 0.2; {desk.tells(CANCELLED)}) > /dev/null 2>&1 &"
    desk.answer("scontrol", f"{late} exit 1")
    assert end_of(FIRST, desk.log.read_text) == (None, "cancelled")


@pytest.mark.parametrize(("state", "near"), [("RUNNING", True), ("COMPLETING", False)])
def test_the_end_that_a_cancellation_has_set_is_no_time_limit(state: str, near: bool) -> None:
    assert _limit_near(JobView(state, 0, False, time.time() + 5), 90.0) is near
