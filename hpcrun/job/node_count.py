"""The number of nodes of a step, where ``job.nodes`` is a range, or where the job has lost a node."""

from collections.abc import Mapping
from typing import Any


def nodes_for_step(nodes: int | str, living: int) -> int:
    """Return the number of nodes for the next step; 0: too few nodes live.

    Args:
        nodes: the value of ``job.nodes``, such as 3 or "3-4".
        living: the nodes of the job that can run ranks.
    """
    least, _, most = str(nodes).partition("-")
    count = min(living, int(most or least))
    return count if count >= int(least) else 0


def step_options(nodes: int, tasks: int) -> list[str]:
    """Return the options of srun for ``tasks`` tasks on each of ``nodes`` nodes.

    All three, since srun takes from SLURM_NTASKS the number of tasks of the job's start, and 22.05 then finds
    "More processors requested than permitted".
    """
    return [f"--nodes={nodes}", f"--ntasks={nodes * tasks}", f"--ntasks-per-node={tasks}"]


def tasks_on_node(job: Mapping[str, Any]) -> int:
    """Return the tasks per node that the section ``job`` of a resolved config requests."""
    if job.get("launcher"):
        return 1
    return int(job.get("tasks_per_node") or job.get("gpus") or 1)


def elastic_options(job: Mapping[str, Any]) -> list[str]:
    """Return srun's option for a range of nodes; none for one number, which sbatch has with the tasks."""
    if "-" not in str(job.get("nodes")):
        return []
    return [f"--ntasks-per-node={tasks_on_node(job)}"]
