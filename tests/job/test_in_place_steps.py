"""The batch step between two attempts in one allocation, with substitutes for Slurm's programs."""

import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from hpcrun.job.opening import open_attempt
from hpcrun.job.policy import Budgets
from hpcrun.run.attempt import Attempt
from hpcrun.run.files import make_log_folder, read_json
from hpcrun.run.journal.opening import Occupied, Refused
from tests.support import jobs
from tests.support.journal import read_events, record_event

from .step_substitutes import FIRST, SHOWN, Desk

# A rank of the second attempt trains to the end.
RANK = """\
for word in "$@"; do case $word in --output=*) logs=$(dirname "${word#--output=}");; esac; done
touch "$logs/rank-00000.log"
"""
FINISHES = """\
line='{"time": 9e9, "job": "7", "restart": 0, "in_place": 1, "event": "%%s"}\\n'
printf "$line" opened >> %(events)s; printf "$line" finished >> %(events)s; exit 0
"""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A run whose first attempt has begun to train."""
    desk = Desk(tmp_path)
    open_attempt(desk.run, FIRST, Budgets())
    record_event(desk.run, "started", attempt=FIRST, step=0)
    ranks(desk, f"{RANK}exit 1")
    return desk


def ranks(desk: Desk, first: str, then: str | None = None) -> None:
    """Let srun run ``first`` for the first attempt, and ``then`` for others."""
    events = {"events": shlex.quote(str(desk.run.events))}
    then = RANK + FINISHES % events if then is None else then
    desk.answer("srun", f'if [[ "$*" == */restart-0/* ]]; then\n{first}\nfi\n{then}')


def requeued(desk: Desk) -> bool:
    return "scontrol requeue 7" in desk.called("scontrol")


def test_a_crash_is_followed_by_a_new_step(desk: Desk) -> None:
    assert desk.step() == 0, desk.told()
    assert desk.ends() == ["crash", "finished"]
    first, second = desk.called("srun")
    assert "--immediate" not in first
    # Otherwise srun would wait until the end of the job for resources that do not become free.
    assert "--immediate=60" in second
    assert not requeued(desk)


@pytest.mark.parametrize(
    "end", ["exit 1", f"{RANK}echo 'srun: error: Application launch failed: Gone'; exit 233"]
)
def test_a_step_that_does_not_start_uses_no_budget(desk: Desk, end: str) -> None:
    ranks(desk, f"{RANK}exit 1", end)
    assert desk.step() == 0, desk.told()
    assert desk.ends() == ["crash"], desk.told()
    assert requeued(desk)


def test_a_setup_that_fails_later_leads_to_a_requeue(tmp_path: Path) -> None:
    desk = Desk(tmp_path, setup=[f"mkdir {shlex.quote(str(tmp_path / 'once'))}"])
    open_attempt(desk.run, FIRST, Budgets())
    record_event(desk.run, "started", attempt=FIRST, step=0)
    ranks(desk, f"{RANK}exit 1")
    assert desk.step() == 0, desk.told()
    assert desk.ends() == ["crash"], desk.told()
    assert requeued(desk)


@pytest.mark.parametrize("number", ["USR2", "TERM"])
def test_a_signal_between_two_attempts_leads_to_a_requeue(desk: Desk, number: str) -> None:
    desk.answer("squeue", f"kill -{number} $PPID")
    assert desk.step() == 0, desk.told()
    assert f"SIG{number} arrived" in desk.told()
    assert desk.ends() == ["crash"]
    assert requeued(desk)


@pytest.mark.parametrize("asked", ["preempted", "cancelled"])
def test_a_request_between_two_attempts_is_obeyed(desk: Desk, asked: str) -> None:
    line = f'{{"time": 9e9, "event": "{asked}", "job": "7", "restart": 0}}'
    desk.answer("squeue", f"echo '{line}' >> {shlex.quote(str(desk.run.events))}")
    assert desk.step() == (0 if asked == "preempted" else 143), desk.told()
    assert len(desk.called("srun")) == 1
    assert requeued(desk) == (asked == "preempted")


def test_a_cancellation_before_the_next_attempt_opens_is_kept(desk: Desk) -> None:
    record_event(desk.run, "ended", attempt=FIRST, cause="crash", restart_allowed=True)
    record_event(desk.run, "cancelled", attempt=FIRST)
    with pytest.raises(Occupied, match="job 7 is cancelled"):
        open_attempt(desk.run, FIRST.following, Budgets())
    assert read_events(desk.run).asked_to_end(FIRST.following)


def test_ranks_without_an_srun_end_before_the_record(desk: Desk) -> None:
    """Ranks that survive their srun would save after the recorded end."""
    alive = shlex.quote(str(desk.calls.parent / "alive"))
    ranks(desk, f"{RANK}touch {alive}; exit 137")
    desk.answer("squeue", f"[ ! -e {alive} ] || echo '7.0|hpcrun-7-0'")
    ended = f"grep -c ended {shlex.quote(str(desk.run.events))}"
    desk.answer("scancel", f"rm {alive}; {ended} > {shlex.quote(str(desk.calls.parent / 'n'))}")
    assert desk.step() == 0, desk.told()
    assert desk.called("scancel") == ["scancel --signal=KILL 7.0"]
    assert (desk.calls.parent / "n").read_text() == "0\n"
    assert desk.ends() == ["crash", "finished"]


def test_the_job_of_a_killed_batch_step_is_requeued(desk: Desk) -> None:
    ranks(desk, f"{RANK}touch {shlex.quote(str(desk.calls.parent / 'alive'))}; exec sleep 60")
    desk.run.unstarted("7").write_text("n1\n")
    first = desk.start()
    jobs.wait_for((desk.calls.parent / "alive").exists)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait(60) == -signal.SIGKILL
    # The batch script starts the program again, because this file is there.
    assert desk.run.unstarted("7").exists()
    assert desk.step() == 0, desk.told()
    assert requeued(desk)
    assert len(desk.called("srun")) == 1
    assert not desk.run.unstarted("7").exists()
    assert desk.ends() == ["node-failure"]
    with pytest.raises(Refused, match="1 node failure, 0 allowed"):
        open_attempt(desk.run, Attempt("7", 1), Budgets(node_failure=0))


def after_a_kill(desk: Desk, restart: int = 0) -> int:
    """Run the program again that the batch script starts after a kill of the batch step."""
    attempt = Attempt("7", restart)
    make_log_folder(desk.run.attempt_logs(attempt))
    desk.run.unstarted("7").write_text("begun n1\n")
    shown = SHOWN.replace("Restarts=0", f"Restarts={restart}")
    desk.answer("scontrol", f"[ $1 = show ] && [ $2 = job ] && printf '{shown}'; true")
    return desk.step(SLURM_RESTART_COUNT=str(restart))


def test_kills_before_the_ranks_open_use_the_budget(desk: Desk) -> None:
    for restart in range(10):
        record_event(desk.run, "ended", attempt=Attempt("7", restart), cause="node-failure")
    assert after_a_kill(desk, 10) == 137, desk.told()
    assert not requeued(desk)
    result = read_json(desk.run.result) or {}
    assert (result["cause"], result["state"]) == ("node-failure", "failed")
    assert "11 node failures, 10 allowed" in result["reason"]


@pytest.mark.parametrize(
    ("event", "fields", "code", "cause"),
    [
        ("ended", {"cause": "save-failed", "restart_allowed": False}, 74, "save-failed"),
        ("finished", {}, 0, None),
        ("cancelled", {}, 143, "cancelled"),
    ],
)
def test_a_final_end_stays_final_after_a_kill(
    desk: Desk, event: str, fields: dict[str, Any], code: int, cause: str | None
) -> None:
    record_event(desk.run, event, attempt=FIRST, **fields)
    assert after_a_kill(desk) == code, desk.told()
    assert not requeued(desk)
    assert (read_json(desk.run.result) or {}).get("cause") == cause
    assert desk.run.result.exists()


@pytest.mark.parametrize("newer", [Attempt("7", 1), Attempt("8", 0)])
def test_a_killed_batch_step_leaves_a_newer_attempt_alone(desk: Desk, newer: Attempt) -> None:
    open_attempt(desk.run, newer, Budgets())
    assert after_a_kill(desk) == 1, desk.told()
    assert f"{newer.owner} owns the run now" in desk.told()
    assert not requeued(desk)
    assert not desk.run.result.exists()
    # The end of the first attempt, which the newer one has recorded.
    assert desk.ends() == ["node-failure"]


def test_a_step_that_failed_before_its_ranks_starts_them(desk: Desk) -> None:
    desk.run.unstarted("7").write_text("begun n1\n")
    assert desk.step() == 0, desk.told()
    assert desk.ends() == ["crash", "finished"]
