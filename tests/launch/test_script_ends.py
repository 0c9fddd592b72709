"""A script that fails gets one cause on every cluster: here on the local one, in tests/slurm on Slurm."""

import os
import sys
from pathlib import Path

import pytest

from hpcrun.cli.main import guarded
from hpcrun.run.directory import RunDirectory
from tests import failing_scripts, jobs
from tests.failing_scripts import NAMES, Way

RANKS = 2


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDirectory]:
    """All the ways at once: each waits more than it computes."""
    folder = tmp_path_factory.mktemp("ways")
    (folder / "fails.py").write_text(failing_scripts.PROGRAM)
    (folder / "wrap.sh").write_text(failing_scripts.WRAPPER)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        return {name: start(folder, way) for name, way in NAMES.items()}


def start(folder: Path, way: Way) -> RunDirectory:
    shape = ("--nodes", "2", "--gpus", "1", "--cpu", "--executor", "local", "--detach")
    more = ["--name", way.name, "--no-snapshot", "restarts.crash=0", *way.options]
    if way.name == "hang":
        more += ["job.time=00:00:20", "job.signal_lead=5"]
    # In this process, which has imported everything.
    assert guarded(["submit", *shape, *more, "--", *way.command]) == 0
    return RunDirectory(folder / "runs" / way.name)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_that_fails_gets_its_cause_in_words(
    name: str, runs: dict[str, RunDirectory]
) -> None:
    jobs.wait_for_end(runs[name])
    failing_scripts.check(NAMES[name], jobs.result(runs[name]), RANKS)
    assert len(jobs.events(runs[name], "opened")) == 1
