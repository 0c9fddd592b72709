"""The nodes of a step: which nodes of the job it uses, and the options and variables that say so.

The variables of the batch script describe all nodes of the job, as they were at its start.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

_EQUAL = re.compile(r"(\d+)\(x\d+\)|\d+")


@dataclass(frozen=True)
class JobShape:
    """The nodes of a job. ``wanted``: ``job.nodes``, the number of nodes of a step. ``tasks``: per node."""

    nodes: tuple[str, ...]
    wanted: int | str
    tasks: int


def nodes_for_step(nodes: int | str, living: int) -> int:
    """Return the number of nodes for the next step; 0: too few nodes live.

    Args:
        nodes: the value of ``job.nodes``, such as 3 or "3-4".
        living: the nodes of the job that can run ranks.
    """
    least, _, most = str(nodes).partition("-")
    count = min(living, int(most or least))
    return count if count >= int(least) else 0


def choose_nodes(
    shape: JobShape,
    bad: Collection[str],
    before: Sequence[str] = (),
    suspects: Collection[str] = (),
) -> tuple[str, ...] | None:
    """Return the nodes of the next step, in the job's order; None if too few are left.

    Nodes of the step ``before`` stay, because they may hold copies of the last save, and files of the run.
    ``suspects`` are used only if the others are too few.
    """
    good = [node for node in shape.nodes if node not in bad]
    count = nodes_for_step(shape.wanted, len(good))
    if not count:
        return None
    preferred = sorted(good, key=lambda node: (node in suspects, node not in before))
    return tuple(node for node in good if node in preferred[:count])


def replacements(before: Sequence[str], now: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return each node of the step ``before`` that is used no more, with the node in its place."""
    new = [node for node in now if node not in before]
    gone = [node for node in before if node not in now]
    return [(node, new[index] if index < len(new) else None) for index, node in enumerate(gone)]


def count_options(nodes: int, tasks: int) -> list[str]:
    """Return the options of srun for ``tasks`` tasks on each of ``nodes`` nodes.

    All three, since srun takes from SLURM_NTASKS the number of tasks of the job's start, and 22.05 then finds
    "More processors requested than permitted".
    """
    return [f"--nodes={nodes}", f"--ntasks={nodes * tasks}", f"--ntasks-per-node={tasks}"]


def step_options(shape: JobShape, nodes: Sequence[str], *, overlap: bool) -> list[str]:
    """Return the options of each srun of a step on ``nodes``.

    Args:
        overlap: a step with a lost node holds its resources until Slurm notices the loss; the next step
            shares them. Its processes on the other nodes have ended.
    """
    return [
        "--no-kill",
        *count_options(len(nodes), shape.tasks),
        f"--nodelist={','.join(nodes)}",
        *(["--overlap"] if overlap else []),
    ]


def step_variables(
    environ: Mapping[str, str], shape: JobShape, nodes: Sequence[str]
) -> dict[str, str]:
    """Return ``environ`` as it would be in a job of ``nodes`` only."""
    count = len(nodes)
    hosts, tasks = ",".join(nodes), str(count * shape.tasks)
    own = {"SLURM_JOB_NUM_NODES": str(count), "SLURM_NNODES": str(count)}
    own |= {"SLURM_JOB_NODELIST": hosts, "SLURM_NODELIST": hosts}
    own |= {"SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks}
    own["SLURM_TASKS_PER_NODE"] = f"{shape.tasks}(x{count})" if count > 1 else str(shape.tasks)
    cores = _EQUAL.fullmatch(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if cores is not None and cores[1]:
        own["SLURM_JOB_CPUS_PER_NODE"] = f"{cores[1]}(x{count})" if count > 1 else cores[1]
    return {**environ, **own}
