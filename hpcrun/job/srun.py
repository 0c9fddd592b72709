"""The srun command of a job: one task per rank."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.config import Config, Job
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.containers import ImageRequest, container_of
from hpcrun.slurm.node_setup import node_setup_command
from hpcrun.slurm.notation import STEPS
from hpcrun.slurm.own_config import load_own

# The same message as slurmstepd writes for a program that it starts itself.
_FOUND = (
    'type -P "$1" > /dev/null || '
    '{ echo "error: execve(): $1: No such file or directory" >&2; exit 2; }; '
)
_SURVIVE = _FOUND + 'trap "" USR1 USR2; exec "$@"'


LAUNCH = "HPCRUN_LAUNCH"
"""Variable of a person's batch script: a shell line in front of the command of a rank, such as torchrun."""


@dataclass(frozen=True)
class BatchJob:
    """The start of a job that a batch script belongs to. ``end_time``: in Unix seconds, if there is one."""

    attempt: Attempt
    end_time: float | None = None


@dataclass(frozen=True)
class RanksEnd:
    """The exit code of the ranks, or of the command ``failed`` that failed before srun started.

    ``started``: False if too few nodes were left for a step. ``stuck``: why Slurm created no step, in srun's
    words; srun was ended then. ``refused``: the attempt may not begin, so no rank was started.
    """

    code: int
    failed: str | None = None
    started: bool = True
    stuck: str | None = None
    refused: bool = False

    @property
    def killed(self) -> bool:
        """True if srun may have been killed, so that its ranks may still run."""
        return self.code == 128 + signal.SIGKILL


def launch_config(run: RunDirectory, *, own_script: bool = False) -> Config:
    """Return the resolved config; the `job:` section is empty if a person wrote the batch script.

    The section then has only the script's own launcher, see `LAUNCH`.

    Raises:
        UserError: the run is not this user's or not what was submitted, or the file is no resolved config.
        OSError: the file cannot be read, for example because a file server does not answer.
    """
    config = load_own(run)
    job = config.job
    if own_script:
        launch = os.environ.get(LAUNCH)
        words = ["bash", "-c", f'exec {launch} "$@"', "hpcrun"] if launch else []
        return config.model_copy(update={"job": Job(cpu=True, container=words)})
    if job.elastic:
        # sbatch has this option for one number of nodes only.
        args = [f"--ntasks-per-node={job.tasks_on_node}", *job.srun_args]
        return config.model_copy(update={"job": job.model_copy(update={"srun_args": args})})
    return config


def in_container(run: RunDirectory, job: Job) -> Job:
    """Return the section with the words, lines and variables that start the ranks in their image."""
    if job.image is None:
        return job
    image = ImageRequest(job.image, job.mounts, list(job.env), not job.cpu)
    start = container_of(image, run, Path.cwd(), slurm=True)
    return job.model_copy(
        update={
            "setup": [*job.setup, *start.setup],
            "env": {**start.env, **job.env},
            "srun_args": [*start.srun_args, *job.srun_args],
            "container": start.prefix,
            "python": job.python or start.python,
        }
    )


def srun_command(
    run: RunDirectory, attempt: Attempt, job: Job, environ: Mapping[str, str]
) -> list[str]:
    """Return the command that starts one task per rank."""
    cores = environ.get("SLURM_CPUS_PER_TASK")
    return [
        "srun",
        # Without this option, the other ranks would wait for a dead rank in a collective.
        "--kill-on-bad-exit=1",
        # A site's WaitTime would end ranks that still save after the first rank's end (slurm.conf(5)).
        "--wait=0",
        "--unbuffered",
        # If the site makes sbatch export no variables, srun would export none either.
        "--export=ALL",
        *_no_wait(attempt),
        # srun of 22.05 and 23.02 does not inherit this option from sbatch.
        *([f"--cpus-per-task={cores}"] if cores else []),
        *job.srun_args,
        # Last, because the batch step finds the step by its name.
        f"--job-name={step_name(attempt)}",
        # In the name of a log % starts a field of Slurm's.
        "--output=" + f"{run.attempt_logs(attempt)}/".replace("%", "%%") + "rank-%5t.log",
        *surviving(job.container),
        *job.container,
        *(job.python or sys.executable, "-u", "-m", "hpcrun.worker", str(run.path)),
    ]


def node_setup_steps(
    run: RunDirectory, attempt: Attempt, job: Job, environ: Mapping[str, str]
) -> list[list[str]]:
    """Return the srun that prepares the nodes of the ranks; none without ``node_setup`` in the config.

    Raises:
        ClusterError: the nodes in ``srun_args`` cannot be read.
    """
    if not job.node_setup:
        return []
    folder = run.attempt_logs(attempt)
    # The shell has exported job.env before this srun.
    given = [*job.srun_args, *_no_wait(attempt)]
    return [node_setup_command(environ, given, job.node_setup, folder)]


def preflight_steps(run: RunDirectory, job: Job) -> list[list[str]]:
    """Return the program that checks the nodes before the ranks; none without ``preflight``."""
    if not job.preflight:
        return []
    return [[sys.executable, "-m", "hpcrun", "preflight", str(run.path), "--before-ranks"]]


def surviving(container: Sequence[str]) -> list[str]:
    """Return the words in front of a container's command that make it ignore the warning signal.

    Without them a wrapper without signal handlers would die at the warning, while its rank saves. SIGTERM
    still ends the wrapper, also during its start.
    """
    if not container:
        return []
    return ["bash", "-c", _SURVIVE, "hpcrun"]


def step_name(attempt: Attempt) -> str:
    """Return the name of the step of ``attempt``, by which Slurm's lists show it."""
    return f"{STEPS}{attempt.owner}"


def _no_wait(attempt: Attempt) -> list[str]:
    """Return the option with which a step in place gives up after a minute if its resources are not free.

    Without it, srun would wait for them until the end of the job, and a requeue could not follow.
    """
    return ["--immediate=60"] if attempt.in_place else []


def link_batch_log(run: RunDirectory, attempt: Attempt) -> None:
    """Link the error output of a person's own batch script as the run's log: Slurm's messages go there."""
    link = run.batch_log(attempt.job)
    if link.exists():
        return
    target = os.readlink("/proc/self/fd/2")  # noqa: PTH115  (also a pipe's)
    link.unlink(missing_ok=True)
    if Path(target).is_file():
        link.symlink_to(target)
