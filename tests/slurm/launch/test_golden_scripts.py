"""Batch scripts exactly as they go to sbatch.

After an intended change, write them again and read the difference:

    HPCRUN_WRITE_GOLDEN=1 python -m pytest tests/slurm/launch/test_golden_scripts.py
    git diff tests/slurm/launch/golden
"""

import os
import subprocess
from pathlib import Path

import pytest

from hpcrun.config import Config
from hpcrun.slurm.launch.batch_script import BatchRequest, batch_script

GOLDEN = Path(__file__).parent / "golden"

JOBS: dict[str, dict[str, object]] = {
    "plain": {},
    "gpus": {"nodes": 2, "gpus": 4, "cpus_per_task": 8, "mem": "64G", "time": "1-12:00:00"},
    "site": {
        "partition": "long,short", "account": "abc-123", "qos": "high", "constraint": "a100&nvlink",
        "reservation": "maintenance", "exclude": "n[01-03,7]", "time": "90",
        "sbatch_args": ["--comment=it's a \"test\" # 1", "--exclusive=user", "--no-kill"],
        "srun_args": ["--cpu-bind=cores", "--label"],
    },
    "quoted": {},
}  # fmt: skip

RUNS = {"site": "/scratch/me/runs/größe", "quoted": "/scratch/my project/it's $HOME; #1/runs/a"}


def script(name: str) -> str:
    """Return the batch script of one of ``JOBS``."""
    values = {"job": JOBS[name], "command": ["train"], "train": {"batch_size": 64}}
    job = Config.model_validate(values).job
    run = Path(RUNS.get(name, "/scratch/me/runs/gpt"))
    return batch_script(BatchRequest(run=run, job=job, python="/usr/bin/python3"))


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_the_one_that_was_reviewed(name: str) -> None:
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("HPCRUN_WRITE_GOLDEN"):
        path.write_text(script(name))
    assert script(name) == path.read_text()
    subprocess.run(["bash", "-n", path], check=True)
