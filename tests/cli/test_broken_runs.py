"""Runs that really fail: the doctor names the cause, and the rank or node; tests/on_slurm has more ways."""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.launch.jobs import state as state_of
from hpcrun.slurm.local.job_files import read_status
from tests.support import jobs

_SCRIPT = Path(__file__).with_name("broken.py")
# The failure, the cause, the rank, the node, and the cause of the end in the event log.
CASES = [
    ("killed", "rank-killed", 1, None, "crash"),
    ("disk", "disk-full", None, None, "crash"),
    ("module", "module-missing", 1, "local1", "crash"),
    ("arguments", "wrong-arguments", None, None, "bad-input"),
]


def broken(folder: Path, way: str) -> tuple[RunDirectory, dict[str, Any]]:
    """Run the script until it has failed for good, and return the run and the doctor's finding as JSON."""
    shape = ("--nodes", "2", "--gpus", "1", "--cpu", "--executor", "local", "--detach")
    settings = ("--name", way, "job.requeue_delay=0.1", "restarts.crash=0")
    command = ("--", sys.executable, str(_SCRIPT), way)
    done = jobs.hpcrun("submit", *shape, *settings, *command, cwd=folder)
    assert done.returncode == 0, done.stderr
    run = RunDirectory(folder / "runs" / way)
    jobs.wait_for_end(run)
    told = jobs.hpcrun("doctor", way, "--json", cwd=folder)
    assert told.returncode == 1, told.stdout + told.stderr
    return run, json.loads(told.stdout)


@pytest.mark.parametrize(("way", "cause", "rank", "node", "end"), CASES)
def test_the_doctor_names_what_broke_a_run(
    tmp_path: Path, way: str, cause: str, rank: int | None, node: str | None, end: str
) -> None:
    run, found = broken(tmp_path, way)
    logs = "".join(path.read_text() for path in run.logs.rglob("*.log"))
    assert found["id"] == cause, f"{found}\n{logs}"
    assert found["evidence"]
    assert rank is None or found["rank"] == rank, found
    if node is not None:
        assert (found["node"], found["retry"]) == (node, "elsewhere"), found
    assert [event.cause for event in jobs.events(run, "ended")] == [end]
    if way == "killed":
        shown = jobs.hpcrun("status", way, cwd=tmp_path).stdout
        assert "killed: doctor: rank 1" in shown


@pytest.mark.parametrize(("code", "end"), [(0, "finished"), (1, "crash")])
def test_an_end_waits_for_a_disk_that_takes_it(tmp_path: Path, code: int, end: str) -> None:
    line = f"while [ ! -e end ]; do sleep 0.05; done; exit {code}"
    settings = ("--name", "full", "restarts.crash=0", "--executor", "local", "--cpu", "--detach")
    jobs.hpcrun("submit", *settings, "--", "bash", "-c", line, cwd=tmp_path)
    run = RunDirectory(tmp_path / "runs" / "full")
    jobs.wait_for(lambda: bool(jobs.events(run, "started")))
    status = read_status(next(run.logs.glob("*/job.json")).parent)
    assert status is not None
    # As on a full or read-only disk, each write of the controller is refused.
    _, hard = resource.prlimit(status.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(status.pid, resource.RLIMIT_FSIZE, (0, hard))
    (tmp_path / "end").touch()
    jobs.wait_for(lambda: "their end is not written yet" in state_of(run).detail)
    assert (state_of(run).live, jobs.events(run, "ended")) == (True, [])
    resource.prlimit(status.pid, resource.RLIMIT_FSIZE, (hard, hard))
    jobs.wait_for_end(run)
    assert [event.cause for event in jobs.events(run, "ended")] == [end]
    assert state_of(run).word == ("failed" if code else "finished")
