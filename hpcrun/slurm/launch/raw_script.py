"""The batch scripts that a person submits directly: their folder, and the line that submits a run."""

import shlex
import shutil
from pathlib import Path

from hpcrun.config import Config
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.launch.batch_script import BatchRequest, batch_request, sbatch_lines
from hpcrun.slurm.launch.slurm_submission import fitted_to_slurm

_PACKAGE = Path(__file__).resolve().parents[2]
_COPY = _PACKAGE / "sbatch"
SCRIPTS = _COPY if _COPY.is_dir() else _PACKAGE.parent / "sbatch"
"""In a checkout the folder ``sbatch`` at its top, in an installed package a copy of that folder."""

_IN_THE_SCRIPT = ("--requeue", "--open-mode=append")


def raw_command(run: RunDirectory, config: Config) -> str:
    """Return the shell line that submits ``run`` with ``train.sbatch`` and its config's `job:` section."""
    request = batch_request(run, fitted_to_slurm(_without_spares(config)))
    words = ["sbatch", *_options(request), str(SCRIPTS / "train.sbatch"), str(run.path)]
    python3 = shutil.which("python3")
    # The script runs the shell's python3 unless this variable names another interpreter.
    same = python3 is not None and Path(python3).parent == Path(request.python).parent
    return ("" if same else f"PYTHON={shlex.quote(request.python)} ") + shlex.join(words)


def not_in_the_script(config: Config) -> list[str]:
    """Return the keys of `job:` that ``config`` sets and that no option of sbatch can express."""
    keys = ("setup", "node_setup", "preflight", "env", "srun_args", "image", "container", "spares")
    return [f"job.{key}" for key in keys if getattr(config.job, key)]


def _without_spares(config: Config) -> Config:
    return config.model_copy(update={"job": config.job.model_copy(update={"spares": 0})})


def _options(request: BatchRequest) -> list[str]:
    words = [
        word
        for line in sbatch_lines(request.run, request.job)
        for word in shlex.split(line.removeprefix("#SBATCH"))
    ]
    return [word for word in words if word not in _IN_THE_SCRIPT]
