"""The resources that a job requests: GPUs in the site's form, and their share of a node.

Without a request for CPUs, each rank gets one core and the site's memory for one core, too little
for the loaders of a GPU. No request here exceeds the smallest node on which the job may run.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcrun.config import Job
from hpcrun.errors import LaunchError
from hpcrun.printing import say_aside
from hpcrun.slurm.commands import given_option
from hpcrun.slurm.nodes import (
    NodeResources,
    Offer,
    Partition,
    PartitionLimits,
    cluster_offer,
    gpu_types,
)

_GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-task")
_SHARE_OPTIONS = (
    *("cpus-per-task", "cpus-per-gpu", "mincpus", "mem", "mem-per-cpu", "mem-per-gpu", "exclusive"),
    *("core-spec", "thread-spec", "hint", "threads-per-core", "ntasks-per-core", "extra-node-info"),
    *("sockets-per-node", "cores-per-socket", "ntasks-per-socket"),
)
# Options that fix the nodes or the number of tasks, long and short.
_FIXED_COUNTS = {
    **{"nodes": "N", "ntasks": "n", "ntasks-per-node": None, "ntasks-per-gpu": None},
    **{"nodelist": "w", "nodefile": "F", "relative": "r", "use-min-nodes": None},
}
_FEATURES = re.compile(r"[\w.-]+(?:[&,][\w.-]+)*")


@dataclass(frozen=True)
class CpuAndMemory:
    """CPUs for each rank and memory of each node (MiB); None: left to Slurm."""

    cpus_per_task: int | None
    memory: int | None


def fitted(job: Job, offer_of: Callable[[], Offer | None] = cluster_offer) -> tuple[Job, list[str]]:
    """Return ``job`` with everything filled in that depends on this cluster, and lines for the user about it.

    Raises:
        LaunchError: no node has GPUs of the requested type, or so many GPUs.
    """
    if job.cpu:
        return job.model_copy(update=_one_core_per_rank(job)), []
    offer = offer_of()
    lines = []
    update: dict[str, object] = {}
    if job.gpu_type is not None and offer is not None:
        update["gpu_type"] = _type_as_spelled(job, job.gpu_type, _nodes_for(job, offer))
    request = gpu_request(job, offer)
    if request == "none" and job.gpu_request == "auto" and not _asks_for_gpus(job):
        lines.append(
            "no node has a gpu GRES: no GPUs are requested from Slurm (job.gpu_request changes that); a node "
            "on which the ranks see no GPU is refused (--cpu trains on CPUs)"
        )
    update["gpu_request"] = request
    nodes = () if offer is None or request == "none" else _nodes_for(job, offer)
    most = max((node.gpu_count(job.gpu_type) for node in nodes), default=0)
    if 0 < most < job.gpus:
        raise LaunchError(
            f"job.gpus: {job.gpus} per node, but a node has at most {most}; use more --nodes"
        )
    share = None if offer is None else node_share(job, offer)
    if share is not None:
        update["cpus_per_task"] = share.cpus_per_task
        if share.cpus_per_task is not None and job.launcher is None:
            # A task that starts several ranks gets the cores of all its ranks.
            update["cpus_per_task"] = max(1, share.cpus_per_task * job.gpus // job.tasks_on_node)
        update["mem"] = None if share.memory is None else f"{share.memory}M"
        lines.append(_in_words(share))
    elif job.node_share:
        update |= _one_core_per_rank(job)
    return job.model_copy(update=update), lines


def refuse_fixed_counts(job: Job) -> None:
    """Refuse options that contradict a range of ``job.nodes``, or spare nodes.

    Raises:
        LaunchError: an option of sbatch or srun fixes the nodes or the number of tasks.
    """
    cause = f"job.nodes={job.nodes}" if job.elastic else f"job.spares={job.spares}"
    for key in ("sbatch_args", "srun_args"):
        for option in getattr(job, key):
            if any(given_option([option], *names) is not None for names in _FIXED_COUNTS.items()):
                raise LaunchError(
                    f"job.{key}: {option}: fixes what {cause} leaves to each start; remove the option, or "
                    "use one number of nodes without spares"
                )


def partitions_for(job: Job, offer: Offer) -> list[Partition]:
    """Return the partitions for the job: those that it names, or the default partition."""
    named = partition_names(job)
    if named is None:
        return [partition for partition in offer.partitions if partition.default]
    return [partition for partition in offer.partitions if partition.name in named]


def partition_names(job: Job) -> Sequence[str] | None:
    """Return the names of the partitions that ``job`` asks for; None: the default partition."""
    named = given_option(job.sbatch_args, "partition", "p") or job.partition
    return named.split(",") if named else None


def _one_core_per_rank(job: Job) -> dict[str, object]:
    """Return the cores of a task that starts several ranks: Slurm's own default is one core per task."""
    if job.gpus <= job.tasks_on_node or _asks_for_shares(job):
        return {}
    return {"cpus_per_task": 1 if job.launcher else job.gpus // job.tasks_on_node}


def say(lines: Sequence[str]) -> None:
    """Print the lines of :func:`fitted` on standard error."""
    for line in lines:
        say_aside(f"hpcrun: {line}")


def gpu_request(job: Job, offer: Offer | None) -> str:
    """Return the form of the request for GPUs; never ``auto``."""
    if job.gpu_request != "auto":
        return job.gpu_request
    if _asks_for_gpus(job):
        return "none"
    # If Slurm does not answer, use the form that most sites accept. If only other partitions have
    # GPUs, sbatch refuses the request, which is better than a training on the CPU.
    if offer is None or not offer.nodes:
        return "gpus-per-node"
    nodes = _nodes_for(job, offer, [*offer.visible, *partitions_for(job, offer)])
    return "gpus-per-node" if any(node.gpus for node in nodes or offer.nodes) else "none"


def node_share(job: Job, offer: Offer) -> CpuAndMemory | None:
    """Return the part of a node's CPUs and memory for the job's GPUs; None: nothing is requested.

    It is the smallest part among all nodes on which the job can run, because it may run on any of them.
    """
    if not job.node_share or _asks_for_shares(job):
        return None
    partitions = partitions_for(job, offer)
    nodes = [
        node
        for node in _nodes_for(job, offer, partitions)
        if node.gpu_count(job.gpu_type) >= job.gpus and _has_features(node, job.constraint)
    ]
    if not nodes or not partitions:
        return None
    limits = [offer.limits, *(partition.limits for partition in partitions)]
    cpus = None if _set(limits, "def_cpu_per_gpu") else min(_cpus(node, limits) for node in nodes)
    memory: int | None = min(_memory(node, job.gpus, limits) for node in nodes)
    per_cpu = _least(limits, "max_mem_per_cpu")
    if per_cpu is not None and memory is not None:
        memory = None if cpus is None else min(memory, per_cpu * cpus * job.gpus)
    whole = any(partition.exclusive for partition in partitions)
    if whole or _set(limits, "def_mem_per_gpu"):
        memory = None
    # A node with fewer cores than GPUs, or without a configured memory, has nothing to share.
    share = CpuAndMemory(cpus or None, memory if memory is not None and memory > 1 else None)
    return None if share == CpuAndMemory(None, None) else share


def _cpus(node: NodeResources, limits: Sequence[PartitionLimits]) -> int:
    most = min(filter(None, (node.cpus, _least(limits, "max_cpus_per_node"))))
    each = most // node.gpu_count()
    # Slurm assigns whole cores: an odd number of threads would need one core too many.
    return each - each % node.threads_per_core


def _memory(node: NodeResources, gpus: int, limits: Sequence[PartitionLimits]) -> int:
    most = min(filter(None, (node.memory, _least(limits, "max_mem_per_node"))), default=0)
    return most * gpus // node.gpu_count()


def _least(limits: Sequence[PartitionLimits], name: str) -> int | None:
    return min((value for one in limits if (value := getattr(one, name))), default=None)


def _set(limits: Sequence[PartitionLimits], name: str) -> bool:
    return _least(limits, name) is not None


def _asks_for_gpus(job: Job) -> bool:
    if given_option(job.sbatch_args, "gpus", "G") is not None:
        return True
    if "gpu" in (given_option(job.sbatch_args, "gres") or ""):
        return True
    return any(given_option(job.sbatch_args, name) is not None for name in _GPU_OPTIONS)


def _asks_for_shares(job: Job) -> bool:
    if job.cpus_per_task is not None or job.mem is not None or job.exclusive:
        return True
    short = {"cpus-per-task": "c", "core-spec": "S", "extra-node-info": "B"}
    return any(
        given_option(job.sbatch_args, name, short.get(name)) is not None for name in _SHARE_OPTIONS
    )


def _nodes_for(
    job: Job, offer: Offer, partitions: Sequence[Partition] | None = None
) -> list[NodeResources]:
    """Return the nodes of the named partitions, or of ``partitions``; all nodes if none is named."""
    if partitions is None:
        partitions = partitions_for(job, offer) if partition_names(job) else offer.visible
    names = {partition.name for partition in partitions}
    return [node for node in offer.nodes if names & node.partitions]


def _has_features(node: NodeResources, constraint: str | None) -> bool:
    """Return True if the node has all features of a simple constraint. Any other constraint counts as met."""
    if constraint is None or not _FEATURES.fullmatch(constraint):
        return True
    return node.features.issuperset(re.split("[&,]", constraint))


def _type_as_spelled(job: Job, wanted: str, nodes: Sequence[NodeResources]) -> str:
    """Return the type as this cluster writes it; raises LaunchError if no node has it."""
    types = gpu_types(nodes)
    found = next((kind for kind in types if kind.lower() == wanted.lower()), None)
    if found is not None or not nodes:
        return found or wanted
    place = f"partition {job.partition}" if job.partition else "this cluster"
    if types:
        raise LaunchError(
            f"job.gpu_type: no node of {place} has GPUs of type {wanted}; there are: {', '.join(types)}"
        )
    have = "have no type" if any(node.gpus for node in nodes) else "are not known to Slurm"
    raise LaunchError(
        f"job.gpu_type: the GPUs of {place} {have}; omit {wanted} (--gpus {job.gpus}), or choose "
        "nodes by their features with job.constraint"
    )


def _in_words(share: CpuAndMemory) -> str:
    parts = []
    if share.cpus_per_task is not None:
        parts.append(f"{share.cpus_per_task} CPUs per rank")
    if share.memory is not None:
        parts.append(f"{share.memory}M of memory per node")
    return (
        f"requests {' and '.join(parts)}, the GPUs' share of the smallest node "
        "(job.node_share=false leaves this to the site)"
    )
