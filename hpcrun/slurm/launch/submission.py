"""From a run directory to a job: choose the executor and submit."""

import shutil
from collections.abc import Callable, Sequence
from typing import Any

from hpcrun import slurm
from hpcrun.config import Config
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.launch.batch_script import batch_request, batch_script
from hpcrun.slurm.launch.sbatch_options import job_name
from hpcrun.slurm.launch.submitted import ExecutorName, Submitted, take_back
from hpcrun.slurm.local.submission import local_devices, refuse_task_counts, submit_local, worker


def choose_executor(config: Config) -> ExecutorName:
    """Return the executor that the config names, or with ``auto`` Slurm if Slurm is configured here.

    Raises:
        LaunchError: there are fewer GPUs than ranks, or the local cluster lacks a requested feature.
    """
    wanted = config.job.executor
    if wanted == "auto":
        wanted = "slurm" if slurm.configured() else "local"
        if wanted == "local" and shutil.which("sbatch") is not None:
            say_aside(
                "hpcrun: Slurm is installed but not configured here; the job runs on this machine"
            )
    if wanted == "local":
        local_devices(config)
        refuse_task_counts(config.job)
    return wanted


def preview(run: RunDirectory, config: Config, executor: ExecutorName) -> str:
    """Return what :func:`submit` would send: the batch script, or the local cluster's plan as comments."""
    if executor in ("slurm", "prepared"):
        from hpcrun.slurm.launch.slurm_submission import (
            bad_nodes,
            fitted_to_slurm,
            say_what_sbatch_is_spared,
        )

        if executor == "slurm":
            say_what_sbatch_is_spared()
        return batch_script(batch_request(run, fitted_to_slurm(config), bad_nodes(config.job)))
    request = batch_request(run, config)
    job = config.job
    lines = [
        f"# {executor}: {job.nodes} x {job.tasks_on_node} processes on this machine, each running",
        f"#   {' '.join(worker(run, job))}",
        "# With Slurm, this script would go to sbatch:",
        "",
    ]
    return "\n".join(lines) + batch_script(request)


def submit(
    run: RunDirectory,
    config: Config,
    executor: ExecutorName,
    after: Sequence[RunDirectory] = (),
    *,
    interrupted: Callable[[], bool] = lambda: False,
) -> Submitted:
    """Start a job for ``run`` and log it.

    Args:
        after: runs that must finish first.
        interrupted: returns True to end the wait for a controller that does not answer.

    Raises:
        LaunchError: the scheduler refused; the text has its message.
        OSError: the run directory cannot be written; no job remains.
        KeyboardInterrupt: ``interrupted`` returned True; no job remains.
    """
    from hpcrun.run.events import record_event

    facts: dict[str, Any] = {"after": [str(other.path) for other in after]} if after else {}
    if executor == "slurm":
        from hpcrun.slurm.launch.dependencies import with_dependency
        from hpcrun.slurm.launch.slurm_submission import submit_slurm

        # Query the cluster's name first: the event must follow the submission without a pause.
        if (cluster := slurm.cluster_name()) is not None:
            facts["cluster"] = cluster
        handed = submit_slurm(run, with_dependency(config, after), interrupted)
        facts["name"] = job_name(run, config.job)
        if handed.cluster is not None:
            facts["cluster"] = handed.cluster
    else:
        handed = submit_local(run, config, after)
    try:
        record_event(
            run,
            "submitted",
            executor=handed.executor,
            job=handed.job_id,
            nodes=config.job.nodes,
            gpus=config.job.gpus,
            **facts,
        )
    except OSError as error:
        take_back(run, handed, error)
        raise
    return handed
