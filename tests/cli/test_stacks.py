"""`hpcrun stacks` on the local cluster: every running rank answers, the other ranks are named."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrun.job import py_spy
from hpcrun.run.directory import RunDirectory
from hpcrun.run.stacks import Stack, StackError
from tests.cli.test_bad_input import require_one_line
from tests.support import jobs

# py-spy must find the process of a rank.
pytestmark = pytest.mark.usefixtures("fresh_processes")

LONG = ("--wait", str(jobs.PATIENCE))
SCRIPT = """
import os, sys, time
def waits_here():
    time.sleep(600)
os.write(1, b"begun\\n")
waits_here()
"""


def ask(folder: Path, name: str, *options: str) -> dict[str, Any]:
    done = jobs.hpcrun("stacks", name, "--json", *options, cwd=folder, timeout=2 * jobs.PATIENCE)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_all_ranks_answer_and_the_training_continues(tmp_path: Path) -> None:
    changes = {
        "job__gpus": 1,
        "train__steps": 30,
        "model__pause": 0.05,
        "train__hang_after": "null",
    }
    run = jobs.submit_probe(tmp_path, "held", **changes)
    with jobs.held_at(run, 3):
        found = ask(tmp_path, "held", *LONG)
        stacks = [stack for reply in found["replies"] for stack in reply["stacks"]]
        assert [stack["rank"] for stack in stacks] == [0, 1]
        for stack in stacks:
            names = [frame["function"] for frame in stack["threads"][0]["frames"]]
            assert stack["step"] >= 3
            assert "main" in names
        done = jobs.hpcrun("stacks", "held", *LONG, cwd=tmp_path)
    assert "2 of 2 tasks answered" in done.stdout.splitlines()[0]
    assert "probe.py:" in done.stdout
    jobs.wait_for_end(run)
    assert jobs.result(run)["state"] == "finished"
    over = jobs.hpcrun("stacks", "held", cwd=tmp_path)
    require_one_line(over, "held: is finished", "hpcrun doctor")


def submit_script(folder: Path, name: str) -> RunDirectory:
    (folder / "waits.py").write_text(SCRIPT)
    command = ("--", sys.executable, "waits.py")
    done = jobs.hpcrun(
        *("submit", "--executor", "local", "--cpu", "--nodes", "1", "--gpus", "2", "--detach"),
        *("--name", name, *command),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    run = RunDirectory(folder / "runs" / name)

    def begun() -> bool:
        logs = run.logs.glob("*/restart-0/rank-*.log")
        return sum("begun" in log.read_text() for log in logs) == 2

    jobs.wait_for(begun)
    return run


def test_py_spy_reads_the_stacks_of_a_script_if_installed(tmp_path: Path) -> None:
    run = submit_script(tmp_path, "script")
    try:
        found = ask(tmp_path, "script", *LONG)
        for reply in found["replies"]:
            if reply["problem"]:
                assert "py-spy" in reply["problem"]
            else:
                (stack,) = reply["stacks"]
                functions = [frame["function"] for frame in stack["threads"][0]["frames"]]
                assert functions[-1] == "waits_here"
        ranks = [stack["rank"] for reply in found["replies"] for stack in reply["stacks"]]
        assert ranks in ([], [0, 1])
    finally:
        jobs.hpcrun("cancel", "script", cwd=tmp_path)
        jobs.wait_for_end(run)


LOADING = """
import os, time
def waits():
    os.write(1, b"begun\\n")
    time.sleep(600)
def read():
    os.write(1, b"begun\\n")
    time.sleep(600)
waits() if os.fork() else read()
"""


@contextlib.contextmanager
def program(path: Path, text: str, lines: int) -> Iterator[int]:
    """Run a script as rank 3 until it has printed ``lines`` lines; yield its pid, and end it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    with subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, env=os.environ | {"RANK": "3"},
        start_new_session=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(lines)] == [b"begun\n"] * lines
        try:
            yield child.pid
        finally:
            os.killpg(child.pid, signal.SIGKILL)


def innermost(stack: Stack) -> str:
    return stack.threads[0].frames[-1].function


def test_a_rank_and_its_workers_are_read_by_py_spy(tmp_path: Path) -> None:
    with program(tmp_path / "loading.py", LOADING, 2) as pid:
        rank, worker = py_spy.script_stacks(pid)
        _, same = py_spy.with_workers((rank,))
    assert (rank.rank, rank.role, innermost(rank)) == (3, None, "waits")
    assert (worker.rank, worker.role, innermost(worker)) == (
        None,
        f"a child of process {pid}",
        "read",
    )
    assert (same.pid, same.role) == (worker.pid, "a worker of rank 3")


def test_what_py_spy_prints_becomes_threads() -> None:
    frame = {"name": "f", "filename": "/a.py", "line": 2, "locals": None}
    outer = frame | {"name": "<module>", "line": 9}
    worker = {"thread_name": "worker", "os_thread_id": 8, "frames": [frame]}
    main = {"thread_name": "MainThread", "os_thread_id": 7, "frames": [frame, outer]}
    first, second = py_spy.parse_dump(json.dumps([worker, main]))
    assert [one.function for one in first.frames] == ["<module>", "f"]
    assert second.name == "worker"
    with pytest.raises(StackError, match="printed no stacks but"):
        py_spy.parse_dump("Process 5: python")


def test_a_wait_of_no_seconds_is_refused(tmp_path: Path) -> None:
    require_one_line(jobs.hpcrun("stacks", "x", "--wait", "0", cwd=tmp_path), "--wait")
