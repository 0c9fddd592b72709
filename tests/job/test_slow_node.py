"""A slow node after the ranks have measured it: what people read, and the next start without it."""

import json
from pathlib import Path

import pytest

from hpcrun.cli.main import guarded
from hpcrun.job.finalize import finalize
from hpcrun.job.opening import open_attempt
from hpcrun.job.policy import Budgets
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.journal.events import Cause
from hpcrun.run.slow_nodes import SlowNode, replaced_hosts, slow_nodes, slow_now
from hpcrun.slurm.avoided_nodes import node_failures
from tests.support.journal import read_events, record_event

from .step_substitutes import FIRST, SHOWN, Desk

SLOW = {"host": "n2", "rank": 3, "ratio": 1.62}
LINE = (
    "n2 is slow: rank 3 takes 1.62 times as long as the others for data and forward pass, "
    "since step 160"
)


def measured(run: RunDirectory, attempt: Attempt = FIRST, **slow: object) -> None:
    record_event(run, "opened", attempt=attempt, executor="local")
    record_event(run, "slow", attempt=attempt, step=160, **(SLOW | slow))


def stopped(run: RunDirectory, *, committed: bool = True) -> None:
    """Record the end of attempt 7-0 by the ranks."""
    open_attempt(run, FIRST, Budgets())
    record_event(run, "started", attempt=FIRST, step=0)
    record_event(run, "slow", attempt=FIRST, step=160, **SLOW)
    record_event(run, "saved", attempt=FIRST, step=200)
    facts = {"step": 200, "committed": committed, "hosts": ["n2"]}
    record_event(run, "stopped", attempt=FIRST, cause="slow-node", **facts)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create(tmp_path / "a", "x", {})


def test_a_slow_node_ends_with_its_attempt_or_before(run: RunDirectory) -> None:
    measured(run)
    record_event(run, "slow-over", attempt=FIRST, step=310, host="n2")
    record_event(run, "slow", attempt=FIRST, step=460, **SLOW)
    found = [SlowNode("n2", 3, 1.62, 160, 310), SlowNode("n2", 3, 1.62, 460)]
    assert slow_nodes(read_events(run)) == found
    assert slow_now(read_events(run)) == found[1:]
    assert found[0].steps == "step 160 to step 310"
    record_event(run, "opened", attempt=Attempt("7", 1))
    assert slow_now(read_events(run)) == []


def test_damaged_events_name_no_node(run: RunDirectory) -> None:
    measured(run, ratio="1.62")
    record_event(run, "slow-over", attempt=FIRST, step=310)
    record_event(run, "stopped", attempt=FIRST, cause="slow-node")
    assert slow_nodes(read_events(run)) == []
    assert replaced_hosts(read_events(run)) == set()


def test_the_end_names_the_node_and_uses_no_crash_budget(run: RunDirectory) -> None:
    stopped(run)
    end = finalize(run, FIRST, 75, Budgets(crash=0, hang=0, preemption=0, no_progress=1))
    assert (end.cause, end.decision.restart, end.step) == (Cause.NODE_FAILURE, True, 200)
    assert end.line == f"{LINE}; stopped and saved at step 200"
    assert end.diagnosis is not None
    assert end.diagnosis.unfit == ("n2",)
    (ended,) = [event for event in read_events(run) if event.tag == "ended"]
    assert ended.host == "n2"
    assert replaced_hosts(read_events(run)) == {"n2"}


def test_a_cancellation_outranks_the_slow_node(run: RunDirectory) -> None:
    stopped(run)
    record_event(run, "cancelled", attempt=FIRST)
    end = finalize(run, FIRST, 75, Budgets())
    assert (end.cause, end.decision.restart) == (Cause.CANCELLED, False)


def test_the_requeue_excludes_the_slow_node_at_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    shown = SHOWN.replace("Requeue=1", "Partition=batch NumNodes=2 Requeue=1")
    desk.answer("scontrol", f"[ $1 = show ] && [ $2 = job ] && printf '{shown}'; true")
    desk.answer("sinfo", "printf 'batch*|n%s|idle|8|100|(null)\\n' 1 2 3")
    stopped(desk.run)
    desk.answer("srun", "exit 75")
    assert desk.step(XDG_STATE_HOME=str(tmp_path)) == 0, desk.told()
    called = desk.called("scontrol")
    assert "scontrol requeue 7" in called
    assert "scontrol update JobId=7 ExcNodeList=n2" in called, desk.told()
    (entry,) = node_failures(tmp_path / "hpcrun" / "nodes.jsonl", 0.0)
    assert (entry.node, entry.why, entry.attempt) == ("n2", LINE, "7-0")


def test_status_and_doctor_name_a_slow_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = create(tmp_path / "runs" / "a", "command: []\ntrain:\n  steps: 900\n", {})
    record_event(run, "submitted", attempt=FIRST, executor="slurm")
    measured(run)
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '7|RUNNING||N/A,N/A|1:00|None|a'\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert guarded(["status", "a"]) == 0
    assert f"a: {LINE}\n" in capsys.readouterr().out
    assert guarded(["status", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slow"] == [LINE]
    # A slow node is no failure.
    assert guarded(["doctor", "a"]) == 0
    assert capsys.readouterr().out == f"hpcrun: no known failure\nnote      {LINE}\n"
    record_event(run, "slow-over", attempt=FIRST, step=310, host="n2")
    assert guarded(["status", "a"]) == 0
    assert "slow" not in capsys.readouterr().out
