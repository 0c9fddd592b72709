"""Unmodified scripts for Lightning and Accelerate, which detect their launcher themselves."""

from pathlib import Path

import pytest

from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.launch import jobs as run_jobs
from tests.support import jobs, scripts_of_others
from tests.support.frameworks import make_environment


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python with both frameworks, in a separate environment with this environment's torch."""
    return make_environment(tmp_path_factory.mktemp("frameworks"), "lightning", "accelerate")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LIGHTNING", "ACCELERATE"])
def test_a_framework_finds_its_ranks_and_survives_a_preemption(
    tmp_path: Path, interpreter: Path, kind: str
) -> None:
    (tmp_path / "train.py").write_text(getattr(scripts_of_others, kind))
    (tmp_path / "saved").mkdir()
    submitted = jobs.hpcrun(
        *("submit", "--nodes", "2", "--gpus", "1", "--cpu", "--executor", "local", "--detach"),
        *("job.requeue_delay=0.1", "--", str(interpreter), "train.py", "8", "saved", "0.2"),
        cwd=tmp_path,
    )
    assert submitted.returncode == 0, submitted.stderr
    run = RunDirectory(tmp_path / "runs" / "train")
    jobs.wait_for(lambda: "epoch 2" in log(run, 0))
    jobs.hpcrun("preempt", "train", cwd=tmp_path)
    jobs.wait_for_end(run)
    ends = [event.cause for event in jobs.events(run, "ended")]
    assert (jobs.result(run).get("state"), ends) == ("finished", ["preemption", "finished"])
    assert "rank 1 of 2 epoch 0\n" in log(run, 0, rank=1)
    assert "of 2 epoch 0\n" not in log(run, 1)
    assert "rank 0 is done" in log(run, 1)


def log(run: RunDirectory, restart: int, rank: int = 0) -> str:
    """Return the output of a rank in an attempt."""
    current = run_jobs.current_job(run)
    assert current is not None
    path = run.attempt_logs(Attempt(current[1], restart)) / f"rank-{rank:05d}.log"
    return path.read_text() if path.exists() else ""
