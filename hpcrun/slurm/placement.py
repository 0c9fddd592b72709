"""Detect the launcher of this process, and read that launcher's variables.

Launchers nest (torchrun in a Slurm step), and each leaves its variables to the processes below it. The rule:
the launcher that started *several* processes on a node numbers the ranks. So torchrun wins over a Slurm step
with one task per node, and a Slurm step with more than one task wins over inherited variables.

It is a separate module because many launchers misread ``4(x2),2``, and a job with an
uneven last node then loses its ranks.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hpcrun.devices.devices import visible_gpus
from hpcrun.errors import ClusterError
from hpcrun.slurm.notation import expand

_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?")


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node, in the node list's order: ``"4(x2),2"`` gives [4, 4, 2].

    The notation is sbatch(1)'s for SLURM_TASKS_PER_NODE: a count, repeated ``(xN)`` times for
    consecutive nodes.

    Raises:
        ClusterError: the text is empty or not in that notation.
    """
    tasks: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None or match.group(2) == "0":
            raise ClusterError(
                f"tasks per node {text!r}: {part!r} is not a count; "
                "expected Slurm's notation such as 4(x2),2 (from SLURM_TASKS_PER_NODE)"
            )
        tasks += [int(match.group(1))] * int(match.group(2) or 1)
    return tasks


LaunchMethod = Literal["slurm", "local", "torchrun", "spawn", "single"]
"""spawn: torch.multiprocessing.spawn, which sets no variables; its caller fills a DistributedConfig."""

LOOPBACK = "127.0.0.1"
TORCHRUN_PORT = 29500
"""torchrun's own default."""

_STEP_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
# slurm.h, SLURM_MAX_NORMAL_STEP_ID: the batch script and salloc's own step have numbers from here up.
_NO_STEP = 0xFFFFFFF0
_STEP_SIZE = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")

_SRUN = "start the process with srun, in an environment of no other step"
_TORCHRUN = "start the process with torchrun, which sets it"
_MPIRUN = "start the ranks with srun or torchrun"
# The variables of an mpirun (OpenMPI; Intel MPI and MPICH), and of its number of processes.
_OF_MPIRUN = {"OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID": "PMI_SIZE"}
_PORT = "set it to a free port of the first host, or unset it"


@dataclass(frozen=True)
class Placement:
    """The place of one process among the others, in uniform terms for all launchers.

    ``tasks_per_node`` is in the order of node ranks, and empty if the launcher does not report it.
    ``master_addr`` and ``master_port`` are None if the launcher does not report them.
    ``own_devices`` is true if the scheduler gave this rank devices that no other rank sees.
    """

    method: LaunchMethod
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    tasks_per_node: tuple[int, ...] = (1,)
    master_addr: str | None = None
    master_port: int | None = None
    job_id: str | None = None
    restart_count: int = 0
    own_devices: bool = False


def read_placement(environ: Mapping[str, str]) -> Placement:
    """Return the placement of the process with this environment.

    Raises:
        ClusterError: a variable is missing or malformed, naming the variable and the remedy.
    """
    local = in_local_cluster(environ)
    step = (local or _in_step(environ)) and "SLURM_PROCID" in environ
    if not (step and max(_step_tasks(environ)) > 1):
        if all(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
            return _torchrun(environ)
        for name, size in _OF_MPIRUN.items():
            if name in environ and whole_number(environ, size, remedy=_MPIRUN, default=1) > 1:
                raise ClusterError(f"{name} is set: mpirun has started this process; {_MPIRUN}")
    if step:
        return _slurm_step(environ, "local" if local else "slurm")
    if whole_number(environ, "PMI_SIZE", remedy=_MPIRUN, default=1) > 1:
        raise ClusterError(f"PMI_SIZE={environ['PMI_SIZE']} is set, but not by srun; {_MPIRUN}")
    if "SLURM_PROCID" in environ:
        return _batch_script(environ)
    if "RANK" in environ and environ.get("WORLD_SIZE", "1") != "1":
        raise ClusterError(
            "RANK and WORLD_SIZE are set but LOCAL_RANK is not: start with torchrun or srun, "
            "or set LOCAL_RANK and LOCAL_WORLD_SIZE too (one rank per machine: 0 and 1), or unset them "
            "for a single rank"
        )
    return Placement("single", job_id=job_id(environ), restart_count=_restarts(environ))


def in_local_cluster(environ: Mapping[str, str]) -> bool:
    """Return True if the local cluster, which imitates Slurm, has started this process."""
    return environ.get("HPCRUN_LOCAL_CLUSTER") == "1"


def _in_step(environ: Mapping[str, str]) -> bool:
    """Return True if srun started this process, as a task of a step.

    Since Slurm 26.05 the batch script has a step number too (-5), as a shell of salloc has in all versions.
    """
    number = environ.get("SLURM_STEP_ID", "")
    return number.isdecimal() and int(number) < _NO_STEP


def scheduler(environ: Mapping[str, str]) -> Literal["slurm", "local", "direct"]:
    """Return the scheduler of this process's job; direct: a person or torchrun started it."""
    if in_local_cluster(environ):
        return "local"
    return "slurm" if job_id(environ) else "direct"


def job_id(environ: Mapping[str, str]) -> str | None:
    """Return the id by which this job is queried and requeued, or None outside Slurm.

    A task of a job array is ``ARRAY_TASK`` and not its own SLURM_JOB_ID (scontrol(1), requeue).
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return environ.get("SLURM_JOB_ID") or None


def step_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of this step, or else of the job, in Slurm's order; empty outside Slurm."""
    if in_local_cluster(environ):
        return []
    return next((expand(environ[name]) for name in _STEP_HOSTS if environ.get(name)), [])


def _slurm_step(environ: Mapping[str, str], method: LaunchMethod) -> Placement:
    """Read a Slurm step: the step's variables before the job's and the legacy variables (srun(1))."""
    tasks = _step_tasks(environ)
    node_rank = whole_number(environ, "SLURM_NODEID", remedy=_SRUN)
    if node_rank >= len(tasks):
        raise ClusterError(
            f"SLURM_NODEID is {node_rank} but the step has {len(tasks)} node(s): variables of two "
            f"steps are mixed; {_SRUN}"
        )
    return Placement(
        method=method,
        rank=whole_number(environ, "SLURM_PROCID", remedy=_SRUN),
        world_size=whole_number(environ, *_STEP_SIZE, minimum=1, remedy=_SRUN, default=sum(tasks)),
        local_rank=whole_number(environ, "SLURM_LOCALID", remedy=_SRUN),
        local_world_size=tasks[node_rank],
        node_rank=node_rank,
        num_nodes=len(tasks),
        tasks_per_node=tasks,
        master_addr=LOOPBACK if method == "local" else _master_of_step(environ, len(tasks)),
        master_port=port_of(environ),
        job_id=job_id(environ),
        restart_count=_restarts(environ),
        own_devices=_has_own_devices(environ, tasks[node_rank]),
    )


def _batch_script(environ: Mapping[str, str]) -> Placement:
    """Read the variables of a process that the batch script started without srun, in a job of one task."""
    size = whole_number(environ, *_STEP_SIZE, minimum=1, remedy=_SRUN, default=1)
    if size > 1:
        raise ClusterError(
            f"this process was started by the batch script of a job with {size} tasks without "
            "srun, so it would wait for the others or train by itself: start it with 'srun python …'"
        )
    return Placement("single", job_id=job_id(environ), restart_count=_restarts(environ))


def _torchrun(environ: Mapping[str, str]) -> Placement:
    """Read torchrun's variables (torch.distributed.run, "Environment Variables")."""
    world_size = whole_number(environ, "WORLD_SIZE", minimum=1, remedy=_TORCHRUN)
    local_size = _local_size(environ, world_size)
    rank = whole_number(environ, "RANK", remedy=_TORCHRUN)
    # torchrun runs one agent, which is one group, on each node.
    num_nodes = whole_number(
        environ,
        "GROUP_WORLD_SIZE",
        minimum=1,
        remedy=_TORCHRUN,
        default=-(-world_size // local_size),
    )
    run_id = environ.get("TORCHELASTIC_RUN_ID", "none")
    elastic_restarts = whole_number(
        environ, "TORCHELASTIC_RESTART_COUNT", remedy=_TORCHRUN, default=0
    )
    return Placement(
        method="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=whole_number(environ, "LOCAL_RANK", remedy=_TORCHRUN),
        local_world_size=local_size,
        node_rank=whole_number(
            environ, "GROUP_RANK", "NODE_RANK", remedy=_TORCHRUN, default=rank // local_size
        ),
        num_nodes=num_nodes,
        tasks_per_node=(local_size,) * num_nodes if local_size * num_nodes == world_size else (),
        master_addr=environ.get("MASTER_ADDR") or (LOOPBACK if num_nodes == 1 else None),
        master_port=port_of(environ) or TORCHRUN_PORT,
        job_id=job_id(environ) or (None if run_id == "none" else run_id),
        restart_count=_restarts(environ) + elastic_restarts,
    )


def _local_size(environ: Mapping[str, str], world_size: int) -> int:
    """Return the ranks of this node; without LOCAL_WORLD_SIZE, a rank for each visible GPU, or all ranks.

    torchrun sets the variable. Ranks that a person starts have the variables of ``env://`` and LOCAL_RANK.
    """
    if environ.get("LOCAL_WORLD_SIZE"):
        return whole_number(environ, "LOCAL_WORLD_SIZE", minimum=1, remedy=_TORCHRUN)
    return ranks_here(world_size, visible_gpus(environ))


def ranks_here(ranks: int, gpus: int) -> int:
    """Return how many of ``ranks`` are on this node, without variables that say so.

    All of them, unless the node has too few GPUs: then each GPU has a rank, since NCCL lets no two ranks
    share one.
    """
    return gpus if 0 < gpus < ranks and ranks % gpus == 0 else ranks


def _step_tasks(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the tasks of each node of the step, never those of the job if the step has the variable."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if environ.get(name):
            return tuple(tasks_per_node(environ[name]))
    raise ClusterError(
        f"SLURM_STEP_TASKS_PER_NODE and SLURM_TASKS_PER_NODE are missing although SLURM_PROCID is "
        f"set; {_SRUN}"
    )


def _master_of_step(environ: Mapping[str, str], nodes: int) -> str:
    """Return MASTER_ADDR, unless it is a loopback address, which an outer torchrun may have set."""
    given = environ.get("MASTER_ADDR")
    loopback = given is not None and (given == "localhost" or given.startswith("127."))
    return given if given and not (loopback and nodes > 1) else _first_host(environ)


def _first_host(environ: Mapping[str, str]) -> str:
    hosts = step_hosts(environ)
    if not hosts:
        raise ClusterError(f"none of {', '.join(_STEP_HOSTS)} is set; {_SRUN}")
    return hosts[0]


def _has_own_devices(environ: Mapping[str, str], tasks_on_node: int) -> bool:
    """Return True if srun gave each task separate GPUs (srun(1), --gpus-per-task, --gpu-bind).

    Slurm passes neither option on to the task, but a bound task's SLURM_STEP_GPUS lists fewer GPUs
    than SLURM_GPUS_ON_NODE counts, while tasks that share see them all (seen with Slurm 22.05).
    """
    mine = [gpu for gpu in environ.get("SLURM_STEP_GPUS", "").split(",") if gpu]
    on_node = whole_number(environ, "SLURM_GPUS_ON_NODE", remedy=_SRUN, default=0)
    return 0 < len(mine) < on_node and tasks_on_node <= on_node


def _restarts(environ: Mapping[str, str]) -> int:
    return whole_number(environ, "SLURM_RESTART_COUNT", remedy=_SRUN, default=0)


def port_of(environ: Mapping[str, str]) -> int | None:
    """Return MASTER_PORT, or None if it is not set; raises ClusterError if it is not a port."""
    if not environ.get("MASTER_PORT"):
        return None
    port = whole_number(environ, "MASTER_PORT", minimum=1, remedy=_PORT)
    if port > 65535:
        raise ClusterError(f"MASTER_PORT is {port}: expected 1 to 65535; {_PORT}")
    return port


def whole_number(
    environ: Mapping[str, str],
    *names: str,
    remedy: str,
    minimum: int = 0,
    default: int | None = None,
) -> int:
    """Return the number in the first variable of ``names`` that is set, or ``default``.

    Raises:
        ClusterError: none is set and there is no default, or it is no number from ``minimum``.
    """
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        if default is None:
            raise ClusterError(f"{' or '.join(names)} is not set; {remedy}")
        return default
    text = environ[name].strip()
    if not (text.isdecimal() and text.isascii()) or int(text) < minimum:
        kind = "a positive number" if minimum else "a number from 0"
        raise ClusterError(f"{name} is {environ[name]!r}: expected {kind}; {remedy}")
    return int(text)
