"""The tasks of a job on this machine: their GPUs, and their command."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.config import Config, Job
from hpcrun.devices.devices import visible_gpus
from hpcrun.errors import LaunchError
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory

if TYPE_CHECKING:
    from hpcrun.slurm.containers import Container


def local_devices(config: Config) -> list[str] | None:
    """Return the GPUs that a local job of ``config`` uses, node after node; None for a job on the CPU.

    Raises:
        LaunchError: this machine has GPUs, but fewer than requested.
    """
    available = visible_gpus(os.environ)
    if config.job.cpu or not available:
        return None
    wanted = config.job.max_nodes * config.job.gpus
    if available < wanted:
        raise LaunchError(
            f"{wanted} ranks, but this machine shows {available} GPUs: request at most {available} "
            "(--nodes 1 --gpus N), or train on the CPU with --cpu"
        )
    return visible_devices()[:wanted]


def visible_devices() -> list[str]:
    """Return the names of all GPUs that this process sees, as CUDA_VISIBLE_DEVICES has them."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named or [str(index) for index in range(visible_gpus(os.environ))]


def say_ignored(job: Job) -> None:
    """Print the options of Slurm's programs in ``job``: this machine runs none of these programs."""
    for key in ("sbatch_args", "srun_args"):
        if options := getattr(job, key):
            say_aside(
                f"hpcrun: job.{key}: this machine has no Slurm and ignores {' '.join(options)}"
            )


def local_container(run: RunDirectory, job: Job) -> "Container | None":
    """Return the start of the ranks' container on this machine; None without ``job.image``."""
    if job.image is None:
        return None
    from hpcrun.slurm.containers import container_of, image_request

    request = image_request(job)
    assert request is not None
    return container_of(request, run, Path.cwd(), slurm=False)


def worker(run: RunDirectory, job: Job) -> list[str]:
    """Return the command of each task of the local cluster."""
    container = local_container(run, job)
    image_python = None if container is None else container.python
    prefix = job.container if container is None else container.prefix
    python = job.python or image_python or sys.executable
    return [*prefix, python, "-u", "-m", "hpcrun.worker", str(run.path)]
