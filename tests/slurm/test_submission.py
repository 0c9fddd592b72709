"""What sbatch answers, and what a person is told then."""

import json
import threading
from pathlib import Path

import pytest

from .cluster import SlurmCluster

pytestmark = pytest.mark.slurm


@pytest.fixture
def runs(slurm: SlurmCluster) -> Path:
    return slurm.shared / "submission-runs"


def submit(slurm: SlurmCluster, runs: Path, name: str, *more: str) -> "tuple[int, str, str]":
    """Submit a job of one rank that does nothing, and return exit code and both outputs."""
    done = slurm.run(
        [
            slurm.python, "-m", "hpcrun", "submit", "--name", name, "--cpu", "--executor", "slurm",
            "--nodes", "1", "--gpus", "1", "--runs-dir", str(runs), "--json", *more, "--", "true",
        ],
        cwd=slurm.shared,
        check=False,
        timeout=180,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_refusal_is_told_in_slurms_words_and_nothing_is_left(
    slurm: SlurmCluster, runs: Path
) -> None:
    code, _, told = submit(slurm, runs, "nowhere", "--partition", "nope")
    assert code == 2
    assert told.startswith("hpcrun: sbatch refused: ")
    assert "nvalid partition" in told
    assert told.count("\n") == 1
    assert not (runs / "nowhere").exists()


@pytest.mark.parametrize("seconds", [12.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_a_submission_waits_for_a_controller_that_is_away(
    slurm: SlurmCluster, runs: Path, seconds: float
) -> None:
    slurm.stop_daemon("slurmctld")
    back = threading.Timer(seconds, slurm.start_daemon, ["slurmctld"])
    back.start()
    try:
        code, out, told = submit(slurm, runs, f"patient-{seconds:.0f}")
    finally:
        back.join()
    assert code == 0, told
    assert "does not answer; trying" in told
    job = json.loads(out)["job_id"]
    assert slurm.wait_state(job) in ("COMPLETED", "FAILED")
