"""The batch scripts that a person submits directly: their folder, and the line that submits a run."""

import shlex
import shutil
from pathlib import Path

from hpcrun.config import Config
from hpcrun.folders import shipped
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.launch.batch_script import BatchRequest, batch_request, sbatch_lines
from hpcrun.slurm.launch.slurm_submission import fitted_to_slurm

SCRIPTS = shipped("sbatch")
_IN_THE_SCRIPT = ("--requeue", "--open-mode=append")


def raw_command(run: RunDirectory, config: Config) -> str:
    """Return the shell line that submits ``run`` with ``train.sbatch`` and its config's `job:` section."""
    # The script cannot choose nodes for a step, and srun needs the tasks per node from sbatch.
    own = config.job.model_copy(update={"nodes": config.job.max_nodes, "spares": 0})
    request = batch_request(run, fitted_to_slurm(config.model_copy(update={"job": own})))
    words = ["sbatch", *_options(request), str(SCRIPTS / "train.sbatch"), str(run.path)]
    python3 = shutil.which("python3")
    # The script runs the shell's python3 unless this variable names another interpreter.
    same = python3 is not None and Path(python3).parent == Path(request.python).parent
    return ("" if same else f"PYTHON={shlex.quote(request.python)} ") + shlex.join(words)


def not_in_the_script(config: Config) -> list[str]:
    """Return a line for each key of `job:` in ``config`` that train.sbatch does not obey."""
    job = config.job
    own = (
        "setup",
        "node_setup",
        "preflight",
        "node_checks",
        "env",
        "srun_args",
        "image",
        "container",
    )
    lines = [
        f"job.{key} is not in train.sbatch; write it there" for key in own if getattr(job, key)
    ]
    if job.elastic:
        lines.append(f"job.nodes={job.nodes}: train.sbatch starts on {job.max_nodes} nodes")
    if job.spares:
        lines.append(f"job.spares={job.spares}: train.sbatch has no spare nodes")
    return lines


def _options(request: BatchRequest) -> list[str]:
    words = [
        word
        for line in sbatch_lines(request.run, request.job)
        for word in shlex.split(line.removeprefix("#SBATCH"))
    ]
    return [word for word in words if word not in _IN_THE_SCRIPT]
