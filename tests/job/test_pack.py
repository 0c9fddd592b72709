"""The end of a job that several runs share, with substitutes for Slurm's programs."""

from pathlib import Path

import pytest

from hpcrun.job.opening import open_attempt
from hpcrun.job.pack import start_pack_again
from hpcrun.job.policy import Budgets
from hpcrun.job.scheduler_view import reason_given
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.events import read_events, record_event
from hpcrun.run.files import read_json
from hpcrun.slurm.avoided_nodes import add_failure, bad_nodes_path, node_failures, suspects

from .slurm_substitutes import FIRST, Desk
from .test_step import Desk as StepDesk

MARK = ["hpcrun: attempt 7-0 on n1"]
JOB = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO {} ***"
WAITS = "JobId={} JobState=PENDING Reason=BeginTime Partition=batch NumNodes=1\\n"
SHOWN = "; [ $1 = show ] && echo 'JobId=7 JobState=RUNNING Restarts=0 '"


@pytest.fixture
def runs(tmp_path: Path) -> list[RunDirectory]:
    runs = [create(tmp_path / f"00{number}", "job: {cpu: true}\n", {}) for number in range(2)]
    for run in runs:
        record_event(run, "submitted", attempt=FIRST, executor="slurm", pack=2)
        record_event(run, "opened", attempt=FIRST, executor="slurm")
        record_event(run, "ended", attempt=FIRST, cause="crash", restart_allowed=True)
        run.logs.mkdir(exist_ok=True)
        (run.logs / "pack-7.log").symlink_to(tmp_path / "batch-7.log")
    return runs


def test_the_cancellation_of_one_run_spares_the_others(
    desk: Desk, runs: list[RunDirectory]
) -> None:
    record_event(runs[0], "cancelled", attempt=FIRST)
    desk.answer("scontrol", desk.tells(*MARK, JOB.format("JOB REQUEUE")) + SHOWN)
    assert start_pack_again(runs, FIRST, None) == 0
    assert [call for call in desk.asked() if "requeue" in call] == ["scontrol requeue 7"]
    states = [(read_json(run.result) or {}).get("state") for run in runs]
    assert states == ["cancelled", None]


def test_each_run_has_the_end_reason_of_the_job(desk: Desk, runs: list[RunDirectory]) -> None:
    desk.log.write_text("\n".join([*MARK, JOB.format("PREEMPTION"), ""]))
    assert [reason_given(run, FIRST) for run in runs] == ["preemption", "preemption"]


@pytest.mark.parametrize("requeued", [True, False])
def test_the_next_start_avoids_a_node_that_failed_often(
    desk: Desk,
    runs: list[RunDirectory],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requeued: bool,
) -> None:
    """The job that is requeued, or where the site forbids that, the own job of each run."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for start in range(2):
        add_failure(bad_nodes_path(), "n1", "killed by SIGBUS", "another run", f"1-{start}")
    desk.answer("sinfo", "printf 'batch*|n%s|idle|(null)\\n' 1 2 3")
    # Each script has its own job: 8 and 9.
    desk.answer("sbatch", f"echo $((7 + $(grep -c ^sbatch {desk.calls})))")
    refuses = "echo 'Access/permission denied' >&2; exit 1"
    desk.answer(
        "scontrol",
        f"""case "$1 $2 $3" in
        "show job 7") if grep -q 'requeue 7' {desk.calls}; then printf '{WAITS.format(7)}'
            else echo 'JobId=7 JobState=RUNNING Restarts=0 '; fi ;;
        "show job "*) printf "{WAITS.format("$3")}" ;;
        "requeue 7 ") {"true" if requeued else refuses} ;;
        esac""",
    )
    for run in runs:
        run.batch_script.write_text("#!/bin/bash\n")
    assert start_pack_again(runs, FIRST, None) == (0 if requeued else 75)
    excluded = [call.split()[2] for call in desk.asked() if "ExcNodeList=n1" in call]
    assert excluded == (["JobId=7"] if requeued else ["JobId=8", "JobId=9"])
    for run in runs:
        told = [event.fields for event in read_events(run) if event.what == "excluded"]
        assert told == [{"hosts": ["n1"]}]


def test_a_node_that_fails_a_pack_has_failed_once(tmp_path: Path) -> None:
    ledger = tmp_path / "nodes.jsonl"
    for run in ("s/000", "s/001"):
        add_failure(ledger, "n1", "killed by SIGBUS", run, FIRST.owner)
    assert suspects(node_failures(ledger, 0.0), after=2) == []
    add_failure(ledger, "n1", "killed by SIGBUS", "s/000", "7-1")
    assert suspects(node_failures(ledger, 0.0), after=2) == ["n1"]


def test_the_step_of_a_packed_run_names_the_node(tmp_path: Path) -> None:
    desk = StepDesk(tmp_path)
    open_attempt(desk.run, FIRST, Budgets())
    desk.answer("srun", "echo 'srun: error: n2: task 0: Killed'; exit 137")
    assert desk.step("--packed", XDG_STATE_HOME=str(tmp_path)) == 75, desk.told()
    (entry,) = node_failures(bad_nodes_path({"XDG_STATE_HOME": str(tmp_path)}), 0.0)
    assert (entry.node, entry.attempt) == ("n2", "7-0")
    assert not [call for call in desk.called("scontrol") if "requeue" in call]
