"""Batch scripts as they go to sbatch, whole, for a reader to judge.

After a change that is meant, write them anew and read the difference:

    HPCRUN_WRITE_GOLDEN=1 python -m pytest tests/launch/test_golden_scripts.py; git diff tests/launch/golden
"""

import os
import subprocess
from pathlib import Path

import pytest

from hpcrun.config import Config
from hpcrun.launch.batch_script import BatchRequest, batch_script

GOLDEN = Path(__file__).parent / "golden"

JOBS: dict[str, dict[str, object]] = {
    "plain": {},
    "gpus": {"nodes": 2, "gpus": 4, "cpus_per_task": 8, "mem": "64G", "time": "1-12:00:00"},
    "cpu": {"nodes": 2, "gpus": 4, "cpu": True, "exclusive": True, "signal_lead": 120},
    "site": {
        "partition": "long,short", "account": "abc-123", "qos": "high", "constraint": "a100&nvlink",
        "reservation": "maintenance", "exclude": "n[01-03,7]", "time": "90",
        "sbatch_args": ["--comment=it's a \"test\" # 1", "--exclusive=user", "--no-kill"],
        "srun_args": ["--cpu-bind=cores", "--label"],
    },
    "setup": {
        "setup": ["module load cuda/12.4", "source \"$HOME/my env/bin/activate\"", "echo '$5 a, b'"],
        "env": {"NCCL_IB_HCA": "mlx5_0,mlx5_1", "NOTE": "it's $HOME; \"a\" # b", "EMPTY": ""},
    },
    "container": {
        "container": ["apptainer", "exec", "--nv", "my image.sif"], "python": "/opt/conda/bin/python",
    },
}  # fmt: skip

RUNS = {"site": "/scratch/me/runs/größe", "setup": "/scratch/my project/it's $HOME; #1/runs/a"}


def script(name: str) -> str:
    """The batch script of one of ``JOBS``."""
    job = Config.model_validate({"job": JOBS[name], "train": {"batch_size": 64}}).job
    python = job.python or "/usr/bin/python3"
    run = Path(RUNS.get(name, "/scratch/me/runs/gpt"))
    folder = str(run / "logs" / "submitit")
    worker = (*job.container, python, "-u", "-m", "hpcrun.worker", "--submitit", folder)
    return batch_script(BatchRequest(run=run, job=job, python="/usr/bin/python3", worker=worker))


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_the_one_that_was_reviewed(name: str) -> None:
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("HPCRUN_WRITE_GOLDEN"):
        path.write_text(script(name))
    assert script(name) == path.read_text()


@pytest.mark.parametrize("name", JOBS)
def test_bash_can_read_the_script(name: str) -> None:
    path = GOLDEN / f"{name}.sbatch"
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_setup_exports_reaches_the_ranks_as_it_was_written(tmp_path: Path) -> None:
    names = ("export NCCL_IB_HCA", "export NOTE", "export EMPTY")
    exports = [line for line in script("setup").splitlines() if line.startswith(names)]
    assert len(exports) == 3
    show = 'printf "%s\\n" "$NCCL_IB_HCA" "$NOTE" "$EMPTY"'
    done = subprocess.run(
        ["bash", "-euc", "\n".join([*exports, show])],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == 'mlx5_0,mlx5_1\nit\'s $HOME; "a" # b\n\n'
