"""A script that fails gets one cause on every cluster: here on the local one, in tests/slurm on Slurm."""

import os
import sys
from pathlib import Path

import pytest

from hpcrun.cli.main import guarded
from hpcrun.run.directory import RunDirectory
from tests import failing_scripts, jobs
from tests.failing_scripts import NAMES

RANKS = 2
_ALWAYS = ("raises-last", "killed", "import", "exit-2", "exit-75", "wrapper", "hang")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in _ALWAYS else pytest.mark.slow) for name in NAMES],
)
def test_a_script_that_fails_gets_its_cause_in_words(
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
    # In this process, which has imported everything.
    assert guarded(["submit", *shape, *more, "--", *way.command]) == 0
    run = RunDirectory(tmp_path / "runs" / name)
    jobs.wait_for_end(run)
    failing_scripts.check(way, jobs.result(run), RANKS)
    assert len(jobs.events(run, "opened")) == 1
