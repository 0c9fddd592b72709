"""The batch step prepares an attempt before its ranks start, and survives a kill in between."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun import exit_codes
from hpcrun.job.opening import open_attempt, prepare_attempt
from hpcrun.job.policy import Budgets
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from hpcrun.run.journal.events import Prepared
from hpcrun.run.journal.opening import Occupied, become_owner
from tests.support.journal import read_events, record_event

from .step_substitutes import FIRST, Desk

SECOND = Attempt("8", 0)
OLD = Path(__file__).parents[1] / "run" / "journal_of_version_before.jsonl"
FINISHES = """\
line='{"time": 9e9, "job": "7", "restart": 0, "event": "%%s"}\\n'
printf "$line" opened >> %(events)s; printf "$line" finished >> %(events)s; exit 0
"""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A run whose ranks open their attempt and finish."""
    desk = Desk(tmp_path)
    desk.answer("srun", FINISHES % {"events": shlex.quote(str(desk.run.events))})
    return desk


def tags(run: RunDirectory) -> list[str]:
    return [event.tag for event in read_events(run)]


def test_a_kill_before_the_log_folder_starts_the_ranks(desk: Desk) -> None:
    prepare_attempt(desk.run, FIRST, Budgets(), "slurm")
    desk.run.unstarted("7").write_text("begun n1\n")
    assert desk.step() == 0, desk.told()
    assert tags(desk.run) == ["prepared", "prepared", "opened", "finished", "ended"]
    assert len(desk.called("srun")) == 1


def test_a_kill_between_prepared_and_opened_is_a_node_failure(tmp_path: Path) -> None:
    desk = Desk(tmp_path, setup=["kill -9 $PPID $$"])
    desk.run.unstarted("7").write_text("n1\n")
    assert desk.step() == -9
    assert tags(desk.run) == ["prepared"]
    assert desk.called("srun") == []
    assert desk.step() == 0, desk.told()
    assert desk.ends() == ["node-failure"]
    assert "scontrol requeue 7" in desk.called("scontrol")
    prepare_attempt(desk.run, Attempt("7", 1), Budgets(), "slurm")


def test_the_policy_refuses_an_attempt_before_its_ranks_start(desk: Desk) -> None:
    record_event(desk.run, "submitted", attempt=FIRST, executor="slurm")
    for restart in range(11):
        earlier = Attempt("7", restart)
        record_event(desk.run, "opened", attempt=earlier)
        record_event(desk.run, "ended", attempt=earlier, cause="node-failure")
    shown = "JobId=7 JobState=RUNNING Restarts=11"
    desk.answer("scontrol", f"[ $1 = show ] && [ $2 = job ] && echo '{shown}'; true")
    assert desk.step(SLURM_RESTART_COUNT="11") == exit_codes.BAD_INPUT, desk.told()
    assert desk.called("srun") == []
    assert tags(desk.run)[-3:] == ["refused", "bad-input", "ended"]
    assert desk.ends()[-1] == "exhausted"
    assert "11 node failures, 10 allowed" in desk.told()
    assert "11 node failures" in (read_json(desk.run.result) or {})["reason"]


def test_a_prepared_job_holds_the_run(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_attempt(desk.run, SECOND, Budgets(), "slurm")
    desk.answer("scontrol", "echo 'JobId=8 JobState=RUNNING Restarts=0'")
    assert desk.step() == exit_codes.BAD_INPUT, desk.told()
    assert "job 8 already has this run; job 7 does not start" in desk.told()
    assert desk.called("srun") == []
    assert tags(desk.run) == ["prepared", "occupied"]
    assert not desk.run.result.exists()
    # A rank of a person's own srun asks in the same way.
    monkeypatch.setenv("PATH", f"{desk.bin}:{os.environ['PATH']}")
    with pytest.raises(Occupied, match="job 8 already has this run"):
        open_attempt(desk.run, FIRST, Budgets(), executor="slurm")
    # The job itself starts again.
    prepare_attempt(desk.run, Attempt("8", 1), Budgets(), "slurm")


def test_preparation_is_no_sign_of_an_attempt(desk: Desk) -> None:
    prepare_attempt(desk.run, FIRST, Budgets(), "local")
    state = read_events(desk.run)
    assert [type(event) for event in state] == [Prepared]
    assert state.is_prepared(FIRST)
    assert (state.attempts, state.owner, state.successor(FIRST)) == ([], None, None)
    assert not desk.run.owner.exists()
    state = become_owner(desk.run, FIRST, state, executor="local")
    assert state.owner == FIRST
    assert (read_json(desk.run.owner) or {})["owner"] == "7-0"


def test_a_run_of_the_version_before_continues(desk: Desk) -> None:
    lines = OLD.read_text().splitlines()
    # The crash of its first attempt has no recorded end.
    cut = next(number for number, line in enumerate(lines) if '"ended"' in line)
    desk.run.events.write_text("\n".join(lines[:cut]) + "\n")
    (before,) = read_events(desk.run).attempts
    assert before.cause is None
    prepare_attempt(desk.run, Attempt(before.attempt.job, 1), Budgets(), "local")
    assert [str(one.cause and one.cause.value) for one in read_events(desk.run).attempts] == [
        "node-failure"
    ]
    assert tags(desk.run)[-2:] == ["ended", "prepared"]


@pytest.mark.parametrize("prepared", [True, False])
def test_only_an_unprepared_rank_imports_the_policy(desk: Desk, prepared: bool) -> None:
    if prepared:
        prepare_attempt(desk.run, FIRST, Budgets(), "slurm")
    program = (
        "import sys; from pathlib import Path; from types import SimpleNamespace as Place\n"
        "from hpcrun.run.attempt import Attempt; from hpcrun.run.directory import RunDirectory\n"
        "from hpcrun.slurm.own_config import load_own; from hpcrun.worker import open_here\n"
        "run = RunDirectory(Path(sys.argv[1]))\n"
        "place = Place(world_size=1, num_nodes=1, launch_method='slurm')\n"
        "open_here(run, Attempt('7', 0), load_own(run), place)\n"
        "print('hpcrun.job.policy' in sys.modules)\n"
    )
    srun = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(desk.run.path)],
        env=os.environ | srun, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"{not prepared}\n"
    state = read_events(desk.run)
    assert tags(desk.run) == [*(["prepared"] if prepared else []), "opened"]
    assert (state.owner, state.openings[0].executor) == (FIRST, "slurm")
