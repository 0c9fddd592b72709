"""A new start of a job that has already finished its run exits with 0 on every rank and changes nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun import exit_codes
from hpcrun.config import resolve, to_yaml
from hpcrun.job.opening import open_attempt
from hpcrun.job.policy import Budgets
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.files import write_json
from tests.support.journal import record_event

STEP = Path(__file__).parents[2] / "slurm" / "recorded" / "22.05" / "shared.env"
FIRST = Attempt("6", 0)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Return a run that job 6 has finished in its first start."""
    run = create(tmp_path / "a", to_yaml(resolve([])), {"folder": str(tmp_path)})
    record_event(run, "submitted", job="6", executor="slurm")
    open_attempt(run, FIRST, Budgets())
    record_event(run, "finished", attempt=FIRST, step=10)
    record_event(run, "ended", attempt=FIRST, cause="finished", step=10, restart_allowed=False)
    write_json(run.result, {"state": "finished", "steps": 10})
    return run


def second_start(rank: int) -> dict[str, str]:
    """Return the environment of a rank in a job that Slurm has started again."""
    step = dict(line.partition("=")[::2] for line in STEP.read_text().splitlines() if line)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_RESTART_COUNT": "1"}
    place |= dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), FIRST.job)
    return {**kept, **step, **place}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_a_later_start_leaves_with_0(run: RunDirectory, rank: int) -> None:
    before = (run.events.read_bytes(), run.result.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "hpcrun.worker", str(run.path)],
        env=second_start(rank),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == exit_codes.DONE, done.stderr
    assert ("the training is done already" in done.stdout) is (rank == 0)
    assert (run.events.read_bytes(), run.result.read_bytes()) == before


def test_the_batch_step_of_that_start_ends_with_0_too(run: RunDirectory) -> None:
    before = (run.events.read_bytes(), run.result.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "hpcrun", "batch", str(run.path)],
        env={**second_start(0), "SLURM_CONF": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == exit_codes.DONE, done.stderr
    assert "is finished: there is nothing left to train" in done.stdout
    assert (run.events.read_bytes(), run.result.read_bytes()) == before
