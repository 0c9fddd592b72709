"""The nodes of a step: which nodes of the job it uses, and the options and variables that say so.

The variables of the batch script describe all nodes of the job, as they were at its start.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpcrun.slurm.notation import expand

_EQUAL = re.compile(r"(\d+)\(x\d+\)|\d+")


@dataclass(frozen=True)
class JobShape:
    """The nodes of a job. ``counts``: allowed numbers of nodes of a step, the best first.

    ``tasks``: tasks per node. ``spares``: nodes beyond the greatest count.
    """

    nodes: tuple[str, ...]
    counts: tuple[int, ...]
    tasks: int
    spares: int = 0


def shape_of(
    environ: Mapping[str, str],
    nodes: int,
    tasks: int,
    spares: int = 0,
    least: int | None = None,
    allowed: Collection[int] | None = None,
) -> JobShape | None:
    """Return the shape of this job; None for a heterogeneous job.

    Args:
        environ: the environment of the batch script.
        nodes: ``job.nodes``, or the greatest of a range.
        tasks: tasks per node.
        spares: ``job.spares``.
        least: the smallest number of nodes of a range; None: only ``nodes``.
        allowed: the numbers of nodes that divide the batch; None: all of the range.
    """
    hosts = environ.get("SLURM_JOB_NODELIST")
    if hosts is None or "SLURM_HET_SIZE" in environ:
        return None
    range_ = range(nodes, (least or nodes) - 1, -1)
    counts = tuple(count for count in range_ if allowed is None or count in allowed)
    return JobShape(tuple(expand(hosts)), counts, tasks, spares)


def choose_nodes(
    shape: JobShape, bad: Collection[str], before: Sequence[str] = ()
) -> tuple[str, ...] | None:
    """Return the nodes of the next step, in the job's order; None if too few are left.

    Nodes of the step ``before`` stay, because they may hold copies of the last save, and files of the run.
    """
    good = [node for node in shape.nodes if node not in bad]
    count = next((count for count in shape.counts if count <= len(good)), None)
    if count is None:
        return None
    kept = [node for node in good if node in before]
    others = [node for node in good if node not in before]
    chosen = {*[*kept, *others][:count]}
    return tuple(node for node in good if node in chosen)


def replacements(before: Sequence[str], now: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return each node of the step ``before`` that is used no more, with the node in its place."""
    new = [node for node in now if node not in before]
    gone = [node for node in before if node not in now]
    return [(node, new[index] if index < len(new) else None) for index, node in enumerate(gone)]


def step_options(shape: JobShape, nodes: Sequence[str], *, overlap: bool) -> list[str]:
    """Return the options of each srun of a step on ``nodes``.

    Args:
        overlap: a step with a lost node holds its resources until Slurm notices the loss; the next step
            shares them. Its processes on the other nodes have ended.
    """
    count = len(nodes)
    return [
        "--no-kill",
        f"--nodes={count}",
        f"--ntasks={count * shape.tasks}",
        f"--ntasks-per-node={shape.tasks}",
        f"--nodelist={','.join(nodes)}",
        *(["--overlap"] if overlap else []),
    ]


def step_variables(
    environ: Mapping[str, str], shape: JobShape, nodes: Sequence[str]
) -> dict[str, str]:
    """Return ``environ`` as it would be in a job of ``nodes`` only."""
    count = len(nodes)
    hosts, tasks = ",".join(nodes), str(count * shape.tasks)
    sizes = {"SLURM_JOB_NUM_NODES": str(count), "SLURM_NNODES": str(count)}
    sizes |= {"SLURM_JOB_NODELIST": hosts, "SLURM_NODELIST": hosts}
    sizes |= {"SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks}
    sizes["SLURM_TASKS_PER_NODE"] = f"{shape.tasks}(x{count})" if count > 1 else str(shape.tasks)
    own = {name: value for name, value in sizes.items() if name in environ}
    cores = _EQUAL.fullmatch(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if cores is not None and cores[1]:
        own["SLURM_JOB_CPUS_PER_NODE"] = f"{cores[1]}(x{count})" if count > 1 else cores[1]
    return {**environ, **own}
