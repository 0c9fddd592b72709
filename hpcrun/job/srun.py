"""The srun command of a job: one task per rank, or one torchrun per node."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcrun.errors import UserError
from hpcrun.nodes.step_nodes import elastic_options, tasks_on_node
from hpcrun.ranks.addresses import is_free, port_candidates
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt
from hpcrun.slurm.containers import ImageRequest, container_of
from hpcrun.slurm.node_setup import node_setup_command
from hpcrun.slurm.notation import STEPS, expand

# The same message as slurmstepd writes for a program that it starts itself.
_FOUND = (
    'type -P "$1" > /dev/null || '
    '{ echo "error: execve(): $1: No such file or directory" >&2; exit 2; }; '
)
_SURVIVE = _FOUND + 'trap "" USR1 USR2; exec "$@"'


@dataclass(frozen=True)
class BatchJob:
    """The start of a job that a batch script belongs to. ``end_time``: in Unix seconds, if there is one."""

    attempt: Attempt
    end_time: float | None = None


@dataclass(frozen=True)
class Way:
    """The kind of batch script.

    ``own_script``: a person wrote it. ``torchrun``: one torchrun per node starts the ranks.
    """

    own_script: bool = False
    torchrun: bool = False


@dataclass(frozen=True)
class RanksEnd:
    """The exit code of the ranks, or of the command ``failed`` that failed before srun started.

    ``left``: the batch step that started them was killed, and another one continues its work. ``started``:
    False if too few nodes were left for a step.
    """

    code: int
    failed: str | None = None
    left: bool = False
    started: bool = True

    @property
    def killed(self) -> bool:
        """True if srun may have been killed, so that its ranks may still run."""
        return self.code == 128 + signal.SIGKILL


@dataclass(frozen=True)
class LaunchOptions:
    """The part of the `job:` section that concerns the ranks; without values for a person's own script.

    ``gpus``: the ranks must not train on CPUs.
    ``script``: the ranks run a program of the user, which may save on SIGTERM. ``node_range``: ``job.nodes``,
    if it is a range. ``spares``: nodes that the ranks do not use. ``gpus_per_node``, ``tasks``: per node.
    ``container``: the words before the command of a rank. ``image``: ``job.image``, with its mounts.
    """

    gpus: bool = False
    setup: Sequence[str] = ()
    node_setup: Sequence[str] = ()
    preflight: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    srun_args: Sequence[str] = ()
    container: Sequence[str] = ()
    image: ImageRequest | None = None
    python: str | None = None
    script: bool = False
    node_range: str | None = None
    spares: int = 0
    gpus_per_node: int = 0
    tasks: int = 1
    in_place: bool = True


def read_launch_options(run: RunDirectory) -> LaunchOptions:
    """Return the launch options from the resolved config, which was checked at its submission.

    Raises:
        UserError: the file is not a resolved config.
        OSError: the file cannot be read.
    """
    # The schema takes ten times as long to import, and the ranks would wait for it.
    import yaml

    try:
        config: Mapping[str, Any] = yaml.safe_load(run.config.read_text()) or {}
        job: Mapping[str, Any] = config.get("job") or {}
        gpus, nodes = int(job.get("gpus") or 1), str(job.get("nodes"))
        return LaunchOptions(
            gpus=not job.get("cpu"),
            setup=[str(line) for line in job.get("setup") or ()],
            node_setup=[str(line) for line in job.get("node_setup") or ()],
            preflight=bool(job.get("preflight")),
            env={str(name): str(value) for name, value in (job.get("env") or {}).items()},
            srun_args=[*elastic_options(job), *map(str, job.get("srun_args") or ())],
            container=[str(word) for word in job.get("container") or ()],
            image=_image_request(job),
            python=job.get("python"),
            script=bool(config.get("command")),
            node_range=nodes if "-" in nodes else None,
            spares=int(job.get("spares") or 0),
            gpus_per_node=0 if job.get("cpu") else gpus,
            tasks=tasks_on_node(job),
            in_place=bool((config.get("restarts") or {}).get("in_place", True)),
        )
    except (yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"{run.config}: is not the config of a run; submit the run again"
        ) from error


def _image_request(job: Mapping[str, Any]) -> ImageRequest | None:
    if not job.get("image"):
        return None
    mounts = [str(mount) for mount in job.get("mounts") or ()]
    return ImageRequest(str(job["image"]), mounts, list(job.get("env") or ()), not job.get("cpu"))


def in_container(run: RunDirectory, options: LaunchOptions) -> LaunchOptions:
    """Return the options with the words, lines and variables that start the ranks in their image."""
    if options.image is None:
        return options
    start = container_of(options.image, run, Path.cwd(), slurm=True)
    return replace(
        options,
        setup=[*options.setup, *start.setup],
        env={**start.env, **options.env},
        srun_args=[*start.srun_args, *options.srun_args],
        container=start.prefix,
        python=options.python or start.python,
    )


def srun_command(
    run: RunDirectory, attempt: Attempt, options: LaunchOptions, environ: Mapping[str, str]
) -> list[str]:
    """Return the command that starts one task per rank."""
    cores = environ.get("SLURM_CPUS_PER_TASK")
    return [
        "srun",
        # Without this option, the other ranks would wait for a dead rank in a collective.
        "--kill-on-bad-exit=1",
        "--unbuffered",
        # If the site makes sbatch export no variables, srun would export none either.
        "--export=ALL",
        *_no_wait(attempt),
        # srun of 22.05 and 23.02 does not inherit this option from sbatch.
        *([f"--cpus-per-task={cores}"] if cores else []),
        *options.srun_args,
        # Last, because the batch step finds the step by its name.
        f"--job-name={step_name(attempt)}",
        f"{output_option(run, attempt)}rank-%5t.log",
        *surviving(options.container),
        *options.container,
        *(options.python or sys.executable, "-u", "-m", "hpcrun.worker", str(run.path)),
    ]


def node_setup_steps(
    run: RunDirectory, attempt: Attempt, options: LaunchOptions, environ: Mapping[str, str]
) -> list[list[str]]:
    """Return the srun that prepares the nodes of the ranks; none without ``node_setup`` in the config.

    Raises:
        ClusterError: the nodes in ``srun_args`` cannot be read.
    """
    if not options.node_setup:
        return []
    folder = run.attempt_logs(attempt)
    # The shell has exported job.env before this srun.
    given = [*options.srun_args, *_no_wait(attempt)]
    return [node_setup_command(environ, given, options.node_setup, folder)]


def preflight_steps(run: RunDirectory, options: LaunchOptions) -> list[list[str]]:
    """Return the program that checks the nodes before the ranks; none without ``preflight``."""
    if not options.preflight:
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


def torchrun_command(
    run: RunDirectory, attempt: Attempt, options: LaunchOptions, environ: Mapping[str, str]
) -> list[str]:
    """Return the command that starts one torchrun per node; its ranks meet on the first node.

    Raises:
        UserError: RANKS is not a number.
    """
    nodes, ranks = environ.get("SLURM_NNODES", "1"), _ranks_per_node(environ)
    hosts = expand(environ["SLURM_JOB_NODELIST"])
    python = options.python or sys.executable
    # SLURM_NODEID exists inside the step only. SIGUSR2 also reaches torchrun, which would die of it.
    start = (
        'trap "" USR1 USR2; exec "$0" -m torch.distributed.run --node-rank="$SLURM_NODEID" "$@" '
        "--max-restarts=0 -m hpcrun.worker " + '"$HPCRUN_RUN"'
    )
    return [
        "srun",
        "--kill-on-bad-exit=1",
        "--unbuffered",
        "--export=ALL",
        f"--job-name={step_name(attempt)}",
        *_no_wait(attempt),
        # No --cpus-per-task: the only task of a node uses all cores of the job there.
        *(f"--ntasks={nodes}", "--ntasks-per-node=1"),
        f"{output_option(run, attempt)}torchrun-%n.log",
        *("bash", "-c", start, python),
        *(f"--nnodes={nodes}", f"--nproc-per-node={ranks}"),
        *(f"--master-addr={hosts[0]}", f"--master-port={_free_port(attempt)}"),
    ]


def torchrun_variables(
    run: RunDirectory, attempt: Attempt, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return variables for the ranks under torchrun: the number of threads, and the folder of their logs."""
    ranks = _ranks_per_node(environ)
    cores = environ.get("SLURM_CPUS_ON_NODE", "1")
    threads = int(cores) // ranks if cores.isdecimal() else 1
    return {
        # torchrun would set it to 1, whatever cores there are.
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or str(max(threads, 1)),
        # torchrun mixes the output of its ranks.
        "HPCRUN_RANK_LOGS": str(run.attempt_logs(attempt)),
        "HPCRUN_RUN": str(run.path),
    }


def _ranks_per_node(environ: Mapping[str, str]) -> int:
    given = environ.get("RANKS") or environ.get("SLURM_GPUS_ON_NODE") or "1"
    if not given.isdecimal() or int(given) < 1:
        raise UserError(f"RANKS is {given!r}: set it to the number of ranks per node")
    return int(given)


def _free_port(attempt: Attempt) -> int:
    for port in port_candidates(attempt.owner):
        if is_free("", port):
            return port
    raise UserError("no free port for torchrun; `ss -ltn` shows the processes that use the ports")


def output_option(run: RunDirectory, attempt: Attempt) -> str:
    """Return the beginning of srun's option for the logs, up to their names; no other srun has it."""
    # In the name of a log % starts a field of Slurm's.
    return f"--output={run.attempt_logs(attempt)}/".replace("%", "%%")


def step_name(attempt: Attempt) -> str:
    """Return the name of the step of ``attempt``, by which Slurm's lists show it."""
    return f"{STEPS}{attempt.owner}"


def _no_wait(attempt: Attempt) -> list[str]:
    """Return the option with which a step in place gives up after a minute if its resources are not free.

    Without it, srun would wait for them until the end of the job, and a requeue could not follow.
    """
    return ["--immediate=60"] if attempt.in_place else []


def newest_left(run: RunDirectory, attempt: Attempt) -> Attempt | None:
    """Return the newest attempt with a folder among ``attempt`` and the attempts in place after it."""
    left = None
    while run.attempt_logs(attempt).exists():
        left, attempt = attempt, attempt.following
    return left


def link_batch_log(run: RunDirectory, attempt: Attempt) -> None:
    """Link the error output of a person's own batch script as the run's log: Slurm's messages go there."""
    link = run.batch_log(attempt.job)
    if link.exists():
        return
    target = os.readlink("/proc/self/fd/2")  # noqa: PTH115  (also a pipe's)
    link.unlink(missing_ok=True)
    if Path(target).is_file():
        link.symlink_to(target)
