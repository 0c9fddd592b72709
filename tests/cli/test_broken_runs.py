"""Runs that really fail, each in another way: the doctor names the cause, and the rank or node."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrun.run.directory import RunDirectory
from tests import jobs

_SCRIPT = Path(__file__).with_name("broken.py")
# The failure, the cause, the rank, the node, and the cause of the end in the event log.
_QUICK = [
    ("killed", "rank-killed", 1, None, "crash"),
    ("disk", "disk-full", None, None, "crash"),
    ("module", "module-missing", 1, "local1", "crash"),
    ("arguments", "wrong-arguments", None, None, "bad-input"),
]
# The failures on a real Slurm are in tests/on_slurm/test_doctor.py.
_SLOW = [
    ("permission", "permission-denied", None, None, "crash"),
    ("syntax", "syntax-error", None, None, "bad-input"),
    ("nccl", "nccl-not-built", None, None, "crash"),
    ("environment", "environment-missing", None, None, "bad-input"),
    ("checkpoint", "archive-damaged", None, None, "crash"),
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


def check(folder: Path, way: str, cause: str, rank: int | None, node: str | None, end: str) -> None:
    """Break a run, and compare the doctor's finding with the requeue decision."""
    run, found = broken(folder, way)
    logs = "".join(path.read_text() for path in run.logs.rglob("*.log"))
    assert found["id"] == cause, f"{found}\n{logs}"
    assert found["evidence"]
    if rank is not None:
        assert found["rank"] == rank, found
    if node is not None:
        assert (found["node"], found["retry"]) == (node, "elsewhere"), found
    assert [event.cause for event in jobs.events(run, "ended")] == [end]


@pytest.mark.parametrize(("way", "cause", "rank", "node", "end"), _QUICK)
def test_the_doctor_names_what_broke_a_run(
    tmp_path: Path, way: str, cause: str, rank: int | None, node: str | None, end: str
) -> None:
    check(tmp_path, way, cause, rank, node, end)
    if way == "killed":
        shown = jobs.hpcrun("status", way, cwd=tmp_path).stdout
        assert "killed: doctor: rank 1" in shown


@pytest.mark.slow
@pytest.mark.parametrize(("way", "cause", "rank", "node", "end"), _SLOW)
def test_the_doctor_names_what_broke_a_run_in_more_ways(
    tmp_path: Path, way: str, cause: str, rank: int | None, node: str | None, end: str
) -> None:
    check(tmp_path, way, cause, rank, node, end)
