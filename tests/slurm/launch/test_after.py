"""``--after RUN`` on the local cluster."""

from pathlib import Path

import pytest

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from tests import jobs

HERE = ("submit", "--cpu", "--executor", "local", "--detach", "--no-snapshot")


def start(folder: Path, name: str, script: str, *options: str) -> RunDirectory:
    """Submit a shell command as a run."""
    done = jobs.hpcrun(*HERE, "--name", name, *options, "--", "sh", "-c", script, cwd=folder)
    assert done.returncode == 0, done.stderr
    return RunDirectory(folder / "runs" / name)


@pytest.mark.slow
def test_a_run_waits_for_another_to_finish_across_its_restarts(tmp_path: Path) -> None:
    first = start(tmp_path, "first", "until [ -e go ]; do sleep 0.1; done", "job.requeue_delay=0.1")
    second = start(tmp_path, "second", "test -e go", "--after", "first")
    jobs.wait_for(lambda: bool(jobs.events(first, "opened")))
    jobs.hpcrun("preempt", "first", cwd=tmp_path)
    jobs.wait_for(lambda: len(jobs.events(first, "opened")) == 2)
    assert '"state": "pending"' in jobs.hpcrun("status", "--json", "second", cwd=tmp_path).stdout
    assert not jobs.events(second, "opened")
    (tmp_path / "go").touch()
    jobs.wait_for_end(second)
    assert jobs.result(second)["state"] == "finished"
    # Finished already: there is nothing to wait for.
    third = start(tmp_path, "third", "true", "--after", "first", "--after", "second")
    jobs.wait_for_end(third)
    assert jobs.result(third)["state"] == "finished"


def test_a_run_whose_forerunner_fails_never_starts_and_says_so(tmp_path: Path) -> None:
    first = start(
        tmp_path, "first", "until [ -e go ]; do sleep 0.1; done; exit 3", "restarts.crash=0"
    )
    second = start(tmp_path, "second", "true", "--after", "first")
    (tmp_path / "go").touch()
    jobs.wait_for_end(first)
    jobs.wait_for_end(second)
    assert not jobs.events(second, "opened")
    told = jobs.hpcrun("status", "second", cwd=tmp_path).stdout
    assert "cancelled while it waited for another run" in told
    again = jobs.hpcrun("resume", "second", cwd=tmp_path)
    assert again.returncode == 2
    assert "--after first: has not finished and does not run (failed)" in again.stderr
    late = jobs.hpcrun(*HERE, "--name", "late", "--after", "first", "--", "true", cwd=tmp_path)
    assert late.returncode == 2
    assert "--after first: has not finished and does not run (failed)" in late.stderr
    assert not (tmp_path / "runs" / "late").exists()
    # It was submitted without a copy of its code, and so it continues without a copy.
    assert jobs.hpcrun("resume", "first", "--detach", cwd=tmp_path).returncode == 0
    assert (read_json(first.record) or {})["snapshot"] is False
    jobs.wait_for_end(first)
