"""Strategies of other packages in the batch step: each start, and a cancellation during the answer."""

import os
from pathlib import Path

import pytest

from hpcrun.job.opening import open_attempt
from hpcrun.job.policy import Budgets
from tests.job.step_substitutes import FIRST, ROOT, SHOWN, Desk
from tests.support.add_ons import install
from tests.support.journal import record_event

TEXT = """
import os
from hpcrun.ports import Start
def chosen(end):
    # What a person does while the strategy thinks.
    os.system(os.environ.get("MEANWHILE", "true"))
    return Start(os.environ["HOW"], "a test")
"""
RANK = """\
for word in "$@"; do case $word in --output=*) logs=$(dirname "${word#--output=}");; esac; done
touch "$logs/rank-00000.log"; [[ "$*" != */restart-0/in-place-1/* ]] || exit 2
exit 1
"""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A run with a strategy. Its first attempt has crashed within a minute of its start."""
    points = {"hpcrun.strategies": {"chosen": "of_a_site:chosen"}}
    install(tmp_path / "site", "of-a-site", points, of_a_site=TEXT)
    desk = Desk(tmp_path, restarts={"strategies": ["chosen"], "crash": 1})
    open_attempt(desk.run, FIRST, Budgets())
    record_event(desk.run, "submitted", attempt=FIRST, executor="slurm", nodes=2)
    desk.run.batch_script.parent.mkdir(exist_ok=True)
    desk.run.batch_script.write_text("#!/bin/bash\n")
    desk.answer("srun", RANK)
    desk.answer("sbatch", "echo 8")
    return desk


def step(desk: Desk, how: str, meanwhile: str = "true") -> int:
    path = f"{ROOT}{os.pathsep}{desk.calls.parent / 'site'}"
    return desk.step(PYTHONPATH=path, HOW=how, MEANWHILE=meanwhile)


def starts(desk: Desk) -> dict[str, int]:
    """Return the number of each kind of start after the first."""
    requeues = sum(call.startswith("scontrol requeue") for call in desk.called("scontrol"))
    again, jobs = len(desk.called("srun")) - 1, len(desk.called("sbatch"))
    return {"step": again, "requeue": requeues, "job": jobs}


@pytest.mark.parametrize("how", ["step", "requeue", "job"])
def test_the_start_is_the_one_that_a_strategy_chooses(desk: Desk, how: str) -> None:
    step(desk, how)
    assert f"the strategy chosen chooses {how}: a test" in desk.told()
    assert starts(desk) == {"step": 0, "requeue": 0, "job": 0, how: 1}, desk.told()


@pytest.mark.parametrize("how", ["step", "requeue", "job"])
def test_a_cancellation_during_the_answer_is_obeyed(desk: Desk, how: str) -> None:
    line = '{"time": 9e9, "event": "cancelled", "job": "7", "restart": 0}'
    assert step(desk, how, f"echo '{line}' >> '{desk.run.events}'") == 143, desk.told()
    assert starts(desk) == {"step": 0, "requeue": 0, "job": 0}


def test_a_job_that_ends_for_an_unknown_reason_stays_ended(desk: Desk) -> None:
    ending = SHOWN.replace("RUNNING", "COMPLETING")
    asked = desk.calls.parent / "asked"
    shown = f"if [ -e '{asked}' ]; then printf '{ending}'; else printf '{SHOWN}'; fi"
    desk.answer("scontrol", f"[ $1 = show ] && [ $2 = job ] && {{ {shown}; }}; true")
    assert step(desk, "job", f"touch '{asked}'") == 143, desk.told()
    assert starts(desk) == {"step": 0, "requeue": 0, "job": 0}
