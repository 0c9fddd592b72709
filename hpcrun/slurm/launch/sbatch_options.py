"""The options of a Slurm job, as lines of its batch script."""

from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.config import Job
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.options import given_option

if TYPE_CHECKING:
    from hpcrun.slurm.launch.array import ArrayTasks


def sbatch_lines(folder: Path, job: Job, array: "ArrayTasks | None" = None) -> list[str]:
    """Return the ``#SBATCH`` lines of a job with its run directory at ``folder``; see sbatch(1).

    Args:
        array: the tasks of the sweep in ``folder``, each with its run directory in it.
    """
    run = RunDirectory(folder)
    options: dict[str, object] = {
        "job-name": run.name.replace("/", "-"),
        "array": array.option if array is not None else None,
        "nodes": job.nodes,
        "ntasks-per-node": job.tasks_on_node,
        **_gpu_options(job),
        "cpus-per-task": job.cpus_of_task,
        "mem": job.mem,
        "time": job.time,
        "clusters": job.cluster,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "reservation": job.reservation,
        "exclude": job.exclude,
        # Slurm sends it to the steps, not to the batch shell, and perhaps a minute early.
        "signal": f"{job.warn_signal}@{job.signal_lead}",
        "output": _output(run, array),
        # A restart must not truncate earlier output.
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{key}={_quoted(value)}" for key, value in options.items() if value]
    # Sites with JobRequeue=0 refuse a requeue without this option.
    lines.append("#SBATCH --requeue")
    if job.exclusive:
        lines.append("#SBATCH --exclusive")
    return lines + [f"#SBATCH {_quoted_option(option)}" for option in job.sbatch_args]


def _output(run: RunDirectory, array: "ArrayTasks | None") -> str:
    """Return the file for the batch script's output; its name contains the job id as squeue prints it."""
    # In Slurm's file names % starts a field.
    folder = str(run.path).replace("%", "%%")
    if array is None:
        return f"{folder}/{run.logs.name}/batch-%j.log"
    if array.packs:
        return f"{folder}/{run.logs.name}/pack-%A_%a.log"
    return f"{folder}/{array.pattern}/{run.logs.name}/batch-%A_%a.log"


def _gpu_options(job: Job) -> dict[str, object]:
    """Return the request for GPUs; ``auto`` is the form that most sites accept."""
    if job.cpu or job.gpu_request == "none":
        return {}
    kind = f"{job.gpu_type}:" if job.gpu_type else ""
    if job.gpu_request == "gres":
        return {"gres": f"gpu:{kind}{job.gpus}"}
    if job.gpu_request == "gpus-per-task":
        return {"gpus-per-task": job.gpus // job.tasks_on_node}
    return {"gpus-per-node": f"{kind}{job.gpus}"}


def job_name(run: RunDirectory, job: Job) -> str:
    """Return the name under which Slurm lists the job."""
    return given_option(job.sbatch_args, "job-name", "J") or run.name.replace("/", "-")


def wanted_cluster(job: Job) -> str | None:
    """Return the cluster, or clusters with commas, that the job names; None: this host's cluster."""
    return job.cluster or given_option(job.sbatch_args, "clusters", "M") or None


def _quoted(value: object) -> str:
    """Quote ``value`` for sbatch, which strips quotes and backslashes itself; # starts a comment there."""
    text = str(value)
    if text and not any(character in text for character in " \t'\"\\#"):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _quoted_option(option: str) -> str:
    name, separator, value = option.partition("=")
    return f"{name}={_quoted(value)}" if separator else name
