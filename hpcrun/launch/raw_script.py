"""The batch scripts that a person submits as they are: where they lie, and the line that submits one."""

import shlex
import shutil
import sys
from pathlib import Path

from hpcrun.config import Config
from hpcrun.launch.batch_script import BatchRequest
from hpcrun.launch.sbatch_options import sbatch_lines
from hpcrun.launch.submission import batch_request, fitted_to_slurm
from hpcrun.run.directory import RunDirectory

_PACKAGE = Path(__file__).resolve().parents[1]
_COPY = _PACKAGE / "sbatch"
SCRIPTS = _COPY if _COPY.is_dir() else _PACKAGE.parent / "sbatch"
"""In a checkout the folder ``sbatch`` at its top, in an installed package a copy of that folder."""

_IN_THE_SCRIPT = ("--requeue", "--open-mode=append")


def raw_command(run: RunDirectory, config: Config) -> str:
    """The shell line that submits ``run`` with ``train.sbatch`` and what its config says under `job:`."""
    request = batch_request(run, fitted_to_slurm(config))
    words = ["sbatch", *_options(request), str(SCRIPTS / "train.sbatch"), str(run.path)]
    return _interpreter(request) + shlex.join(words)


def not_in_the_script(config: Config) -> list[str]:
    """The keys of `job:` that ``config`` sets and that no option of sbatch can carry."""
    keys = ("setup", "node_setup", "preflight", "env", "srun_args", "container")
    return [f"job.{key}" for key in keys if getattr(config.job, key)]


def _options(request: BatchRequest) -> list[str]:
    words = [
        word
        for line in sbatch_lines(request.run, request.job)
        for word in shlex.split(line.removeprefix("#SBATCH"))
    ]
    return [word for word in words if word not in _IN_THE_SCRIPT]


def _interpreter(request: BatchRequest) -> str:
    """Nothing where the shell's own python3 is the one, else the variable that the script reads."""
    found = shutil.which("python3")
    if request.python == sys.executable and found and Path(found).samefile(sys.executable):
        same = Path(found).parent == Path(sys.executable).parent
        return "" if same else f"PYTHON={shlex.quote(request.python)} "
    return f"PYTHON={shlex.quote(request.python)} "
