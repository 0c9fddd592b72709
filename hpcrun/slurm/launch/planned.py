"""What a submission would do, before anything is written: its executor, and its script.

Imports only the modules of the executor.
"""

import shutil
from typing import TYPE_CHECKING

from hpcrun import slurm
from hpcrun.config import Config
from hpcrun.errors import LaunchError
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.launch.batch_script import batch_request, batch_script, submitted_digest

if TYPE_CHECKING:
    from hpcrun.slurm.launch.submitted import ExecutorName


def choose_executor(config: Config) -> "ExecutorName":
    """Return the executor that the config names, or with ``auto`` Slurm if Slurm is configured here.

    Raises:
        LaunchError: there are fewer GPUs than ranks, spare nodes without Slurm, or an option that fixes the
            nodes of a range.
    """
    wanted = config.job.executor
    if wanted == "auto":
        wanted = "slurm" if slurm.configured() else "local"
        if wanted == "local" and shutil.which("sbatch") is not None:
            say_aside(
                "hpcrun: Slurm is installed but not configured here; the job runs on this machine"
            )
    if wanted != "slurm" and config.job.spares:
        raise LaunchError(
            f"job.spares: {config.job.spares}: this machine is the only node, so none can replace "
            "another; use --spares 0, or submit to Slurm"
        )
    if config.job.elastic or config.job.spares:
        from hpcrun.slurm.launch.resources import refuse_fixed_counts

        refuse_fixed_counts(config.job)
    if wanted == "local":
        from hpcrun.slurm.local.tasks import local_devices, say_ignored

        local_devices(config)
        say_ignored(config.job)
    return wanted


def preview(run: RunDirectory, config: Config, executor: "ExecutorName", text: str) -> str:
    """Return what a submission would send: the batch script, or the local cluster's plan as comments.

    ``text``: ``config`` as YAML, as a submission writes it.
    """
    if executor in ("slurm", "prepared"):
        from hpcrun.slurm.launch.slurm_submission import bad_nodes, fitted_to_slurm

        digest = submitted_digest(text)
        request = batch_request(
            run, fitted_to_slurm(config), bad_nodes(config.job), submitted=digest
        )
        return batch_script(request)
    from hpcrun.slurm.local.tasks import worker

    request = batch_request(run, config, submitted=submitted_digest(text))
    job = config.job
    lines = [
        f"# {executor}: {job.max_nodes} x {job.tasks_on_node} processes on this machine, each running",
        f"#   {' '.join(worker(run, job))}",
        "# With Slurm, this script would go to sbatch:",
        "",
    ]
    return "\n".join(lines) + batch_script(request)
