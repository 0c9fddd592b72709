"""A failed script gets the same cause on every cluster: here on the local one, in tests/on_slurm on Slurm."""

import json
import os
import sys
from pathlib import Path

import pytest

from hpcrun.cli.main import guarded
from hpcrun.run.directory import RunDirectory
from tests.support import failing_scripts, jobs
from tests.support.failing_scripts import NAMES

RANKS = 2
_ALWAYS = ("raises-last", "killed", "import", "exit-2", "exit-75", "wrapper", "hang")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in _ALWAYS else pytest.mark.slow) for name in NAMES],
)
def test_a_failed_script_gets_its_cause_and_message(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = NAMES[name]
    (tmp_path / "fails.py").write_text(failing_scripts.PROGRAM)
    (tmp_path / "wrap.sh").write_text(failing_scripts.WRAPPER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    shape = ("--nodes", "2", "--gpus", "1", "--cpu", "--executor", "local", "--detach")
    more = ["--name", name, "--no-snapshot", "restarts.crash=0", *way.options]
    if name == "hang":
        more += ["job.time=00:00:20", "job.signal_lead=5"]
    # In this process, because its imports are done.
    assert guarded(["submit", *shape, *more, "--", *way.command]) == 0
    run = RunDirectory(tmp_path / "runs" / name)
    jobs.wait_for_end(run)
    failing_scripts.check(way, jobs.result(run), RANKS)
    assert len(jobs.events(run, "opened")) == 1


# The task of rank 1 starts after the script of rank 0 has ended.
_LATE = (
    '[ $SLURM_PROCID = 0 ] || until grep -qs \'"end": *"\' '
    "{logs}/$SLURM_JOB_ID/restart-${{SLURM_RESTART_COUNT:-0}}/master.json; do sleep 0.1; done"
)
_AGAIN = (
    "import os, sys; print('works'); sys.exit(75 if os.environ['HPCRUN_RESTART'] == '0' else 0)"
)


@pytest.mark.parametrize(
    ("program", "line", "starts", "causes"),
    [
        ("print('works')", "already ended with exit code 0", 1, ["finished"]),
        (_AGAIN, "rank 0's script has stopped already", 0, ["continued", "finished"]),
    ],
    ids=["done", "to-be-continued"],
)
def test_ranks_starting_after_rank_0_has_ended_do_not_wait(
    program: str,
    line: str,
    starts: int,
    causes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = ("--nodes", "2", "--gpus", "1", "--cpu", "--executor", "local", "--detach")
    run = RunDirectory(tmp_path / "runs" / "late")
    setup = f"job.setup={json.dumps([_LATE.format(logs=run.logs)])}"
    more = ("--name", "late", "--no-snapshot", "job.requeue_delay=0.1", setup)
    assert guarded(["submit", *shape, *more, "--", sys.executable, "-c", program]) == 0
    jobs.wait_for_end(run)
    assert [event.cause for event in jobs.events(run, "ended")] == causes
    assert jobs.result(run)["state"] == "finished"
    (log,) = run.logs.glob("*/restart-0/rank-00001.log")
    assert line in log.read_text()
    assert log.read_text().count("works\n") == starts
