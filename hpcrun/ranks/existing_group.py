"""The process group that a program created itself: its rank and size take precedence over any launcher.

Processes started by hand (``torch.multiprocessing.spawn`` with ``init_process_group``) have no launcher's
variables, or only some. Without the group, each rank would take itself for the only rank.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hpcrun.errors import ClusterError
from hpcrun.ranks.launchers import LOOPBACK, Placement, port_of, read_placement, whole_number


class ExistingGroup(NamedTuple):
    """The default process group of this process. ``nccl``: it has NCCL for tensors on GPUs."""

    rank: int
    world_size: int
    nccl: bool


def made_group() -> ExistingGroup | None:
    """Return this process's default group, or None if there is none. Never imports torch."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    nccl = "nccl" in str(dist.get_backend_config())
    return ExistingGroup(dist.get_rank(), dist.get_world_size(), nccl)


def place_in_group(group: ExistingGroup, environ: Mapping[str, str], gpus: int) -> Placement:
    """Return the placement of this rank of ``group``.

    The launcher's values are kept if they agree. A launcher that started one process per node, each of
    which spawned ranks, gives the number of nodes. Otherwise LOCAL_RANK, LOCAL_WORLD_SIZE and NODE_RANK
    count if they are set. Missing values follow from filling node after node: with NCCL a node has as
    many ranks as visible GPUs, and without NCCL all ranks are on one node.

    Args:
        gpus: GPUs that this process sees.

    Raises:
        ClusterError: the launcher numbers the ranks otherwise, or the ranks of a node cannot be known.
    """
    try:
        found = read_placement(environ)
    except ClusterError:
        # Some of a launcher's variables are missing (RANK without LOCAL_RANK, say); the group has the rest.
        found = Placement("single")
    if (found.rank, found.world_size) == (group.rank, group.world_size):
        return found
    spawned = found.local_world_size == 1 and group.world_size % found.world_size == 0
    if found.world_size > 1 and not spawned:
        raise ClusterError(
            f"the process group says rank {group.rank} of {group.world_size}, and {found.method} says rank "
            f"{found.rank} of {found.world_size}; give init_process_group the launcher's rank and "
            "world_size, or describe the ranks by DistributedConfig(...)"
        )
    # A launcher's variables belong to the process that spawned this process.
    own = environ if found.method == "single" else {}
    local_size = _local_size(group, found.num_nodes, own, gpus)
    nodes = -(-group.world_size // local_size)
    node_rank = found.node_rank if found.num_nodes > 1 else group.rank // local_size
    return replace(
        found,
        method="spawn",
        rank=group.rank,
        world_size=group.world_size,
        local_rank=_number(own, "LOCAL_RANK", group.rank % local_size),
        local_world_size=local_size,
        node_rank=_number(own, "NODE_RANK", node_rank),
        num_nodes=nodes,
        tasks_per_node=(local_size,) * nodes if local_size * nodes == group.world_size else (),
        master_addr=environ.get("MASTER_ADDR") or found.master_addr or LOOPBACK,
        master_port=port_of(environ),
        own_devices=False,
    )


def _local_size(group: ExistingGroup, nodes: int, own: Mapping[str, str], gpus: int) -> int:
    if nodes > 1:
        return group.world_size // nodes
    if not group.nccl or gpus == 0 or own.get("LOCAL_WORLD_SIZE"):
        return _number(own, "LOCAL_WORLD_SIZE", group.world_size, minimum=1)
    if group.world_size <= gpus:
        return group.world_size
    if group.world_size % gpus:
        raise ClusterError(
            f"the process group has {group.world_size} ranks and this node shows {gpus} GPU(s): the ranks of "
            "each node are not known; set LOCAL_RANK, LOCAL_WORLD_SIZE and NODE_RANK in each rank"
        )
    return gpus


def _number(environ: Mapping[str, str], name: str, default: int, *, minimum: int = 0) -> int:
    remedy = "set it to a number, or unset it"
    return whole_number(environ, name, minimum=minimum, remedy=remedy, default=default)
