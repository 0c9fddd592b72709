"""The local cluster as its jobs see it: real processes in the places of nodes and tasks."""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrun.config import file_layer, flag_layer, resolve
from hpcrun.errors import LaunchError
from hpcrun.run.endings import read_exits
from hpcrun.slurm.local import job_files
from hpcrun.slurm.local.job_files import JobRequest, JobStatus, step_environment
from hpcrun.slurm.local.submission import new_job_folder, start_job
from hpcrun.slurm.local.tasks import local_devices
from tests.slurm.launch.local_tasks import say_which, slurm_variables, wait_for_signal
from tests.support import jobs


def request(**changes: Any) -> JobRequest:
    """A request for 2 nodes x 2 tasks with GPUs 4 to 7."""
    fields: dict[str, Any] = {
        "job_id": "1", "folder": "/x", "command": [sys.executable], "nodes": 2, "tasks_per_node": 2,
        "cpus_per_task": None, "devices": ["4", "5", "6", "7"], "time_limit": None,
        "signal_lead": 1.0, "grace": 1.0, "requeue_delay": 0.1, "setup": [], "env": {}, "after": [],
    }  # fmt: skip
    return JobRequest(**(fields | changes))


@dataclasses.dataclass(frozen=True)
class LocalJob:
    """A job of the local cluster, by its folder."""

    folder: Path

    @property
    def status(self) -> JobStatus:
        """The last state that the controller wrote."""
        status = job_files.read_status(self.folder)
        assert status is not None
        return status

    def wait_for(self, state: str) -> None:
        jobs.wait_for(lambda: self.status.state == state, why=state)

    def results(self) -> list[Any]:
        """Wait for the end of the job, and return the result of each task."""
        self.wait_for("COMPLETED")
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("[0-9].json"))]

    def send(self, number: signal.Signals) -> None:
        job_files.send(self.folder, number)


Submit = Callable[..., LocalJob]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Submit a function to 2 nodes x 2 tasks; keywords are fields of the request."""
    # The tasks must find the module of the functions.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))

    def on_two_by_two(function: Callable[..., Any], *arguments: Any, **own: Any) -> LocalJob:
        folder = new_job_folder(tmp_path / "jobs")
        program = [sys.executable, "-m", "tests.slurm.launch.local_tasks", str(folder)]
        command = [*program, function.__name__, *map(json.dumps, arguments)]
        usual = {"job_id": folder.name, "devices": None, "grace": 30.0}
        start_job(request(**usual, folder=str(folder), command=command, **own))()
        return LocalJob(folder)

    return on_two_by_two


def wait_for_files(folder: Path, pattern: str, count: int = 4) -> None:
    """Wait until each task has written its file."""
    jobs.wait_for(lambda: len(list(folder.glob(pattern))) == count, why=pattern)


def test_every_task_gets_slurms_variables_and_gives_its_result_back(submit: Submit) -> None:
    job = submit(slurm_variables)
    seen = job.results()
    assert [task["SLURM_PROCID"] for task in seen] == ["0", "1", "2", "3"]
    assert [task["SLURM_NODEID"] for task in seen] == ["0", "0", "1", "1"]
    assert [task["SLURM_LOCALID"] for task in seen] == ["0", "1", "0", "1"]
    assert [task["SLURMD_NODENAME"] for task in seen] == ["local0"] * 2 + ["local1"] * 2
    for task in seen:
        assert task["SLURM_JOB_ID"] == job.folder.name
        assert task["SLURM_STEP_NODELIST"] == "local[0-1]"
        assert task["SLURM_STEP_TASKS_PER_NODE"] == "2(x2)"
        assert "SLURM_RESTART_COUNT" not in task


def test_setup_reaches_every_task_and_its_failure_ends_it(
    submit: Submit,
) -> None:
    job = submit(say_which, setup=['export MARK="it\'s $((40 + 2))"'])
    assert job.results() == [f"{rank} with it's 42" for rank in range(4)]
    broken = submit(say_which, setup=["cd /nonexistent/place"])
    broken.wait_for("FAILED")
    log = broken.folder / "restart-0" / "rank-00000.log"
    assert "/nonexistent/place" in log.read_text()


def test_node_setup_runs_once_a_node_before_any_task(submit: Submit, tmp_path: Path) -> None:
    # The second node is slow, and the tasks of the first node must still wait for it.
    lines = ['sleep "$SLURM_NODEID"', f'echo "$STAGE" > {tmp_path}/staged-"$SLURMD_NODENAME"']
    counted = f"export MARK=$(cat {tmp_path}/staged-* | grep --count here)"
    job = submit(say_which, node_setup=lines, setup=[counted + " || true"], env={"STAGE": "here"})
    assert job.results() == [f"{rank} with 2" for rank in range(4)]
    assert len(list(tmp_path.glob("staged-*"))) == 2
    assert len(read_exits(job.folder / "restart-0")) == 4


def test_a_node_that_cannot_be_set_up_is_named(submit: Submit) -> None:
    lines = ["cd /", '[ "$SLURM_NODEID" = 0 ] || cd /nonexistent/place', "sleep 0.2"]
    job = submit(say_which, node_setup=lines)
    job.wait_for("FAILED")
    folder = job.folder / "restart-0"
    told = (folder / "node-setup-local1.log").read_text()
    assert "/nonexistent/place" in told
    assert "hpcrun: node_setup failed on local1 with exit code 1" in told
    assert not list(folder.glob("rank-*.log"))


def test_a_cancellation_ends_a_start_that_hangs(submit: Submit, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    job = submit(say_which, before=["bash", "-c", f"echo $$ > {begun}; exec sleep 1000"])
    jobs.wait_for(lambda: begun.exists() and begun.read_text().endswith("\n"), why="the start")
    job.send(job_files.CANCEL)
    job.wait_for("CANCELLED")
    assert not psutil.pid_exists(int(begun.read_text()))


def test_a_failed_task_ends_the_others_with_its_code(submit: Submit) -> None:
    job = submit(say_which, 2)
    job.wait_for("FAILED")
    first, *others = read_exits(job.folder / "restart-0")
    assert (first.rank, first.code, first.induced, first.host) == (2, 7, False, "local1")
    assert {(ended.signal, ended.induced) for ended in others} == {(signal.SIGKILL, True)}


def test_a_time_limit_sends_sigusr2_ahead(submit: Submit, tmp_path: Path) -> None:
    # Six seconds from the start: on a busy machine the task has no handler for an earlier signal.
    early = ['set -- env --block-signal=USR2 "$@"']
    job = submit(wait_for_signal, str(tmp_path), time_limit=60.0, signal_lead=54.0, setup=early)
    wait_for_files(tmp_path, "got-*-0")
    assert {path.read_text() for path in tmp_path.glob("got-*")} == {str(int(signal.SIGUSR2))}
    job.wait_for("COMPLETED")


def test_tasks_do_not_outlive_a_controller_that_is_killed(submit: Submit, tmp_path: Path) -> None:
    job = submit(wait_for_signal, str(tmp_path))
    wait_for_files(tmp_path, "ready-*-0")
    status = job.status
    assert len(status.tasks) == 4
    os.kill(status.pid, signal.SIGKILL)
    jobs.wait_for(lambda: all(map(jobs.has_ended, status.tasks)))
    assert not job_files.is_alive(status)


def test_each_node_sees_its_own_gpus() -> None:
    seen = [step_environment(request(), rank)["CUDA_VISIBLE_DEVICES"] for rank in range(4)]
    assert seen == ["4,5", "4,5", "6,7", "6,7"]
    assert "CUDA_VISIBLE_DEVICES" not in step_environment(request(devices=None), 0)


def test_fewer_gpus_than_ranks_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text("{train: {batch_size: 8}}\n")

    def devices(**job: Any) -> list[str] | None:
        flags = flag_layer({f"job.{key}": (value, f"--{key}") for key, value in job.items()})
        return local_devices(resolve([file_layer(tmp_path / "x.yaml"), flags]))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(LaunchError) as told:
        devices(nodes=2, gpus=4)
    (line,) = str(told.value).splitlines()
    for part in ("8 ranks", "shows 2 GPUs", "at most 2", "--cpu"):
        assert part in line
    assert devices(nodes=2, gpus=1) == ["0", "1"]
    assert devices(nodes=2, gpus=4, cpu=True) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb,GPU-cc")
    assert devices(nodes=1, gpus=2) == ["GPU-aa", "GPU-bb"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices(nodes=2, gpus=4) is None
