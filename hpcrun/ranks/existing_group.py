"""The process group that the program has made itself, and the place of this rank in it."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hpcrun.devices.devices import visible_gpus
from hpcrun.errors import ClusterError
from hpcrun.slurm.placement import (
    LOOPBACK,
    Placement,
    port_of,
    ranks_here,
    read_placement,
    whole_number,
)


class ExistingGroup(NamedTuple):
    """The process group that the program has made itself. ``nccl``: it has NCCL for tensors on GPUs."""

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


def place_in_group(group: ExistingGroup, environ: Mapping[str, str]) -> Placement:
    """Return the placement of this rank of ``group``.

    The launcher's values are kept if they agree. A launcher that started one process per node, each of which
    spawned ranks, gives the number of nodes. Otherwise LOCAL_RANK, LOCAL_WORLD_SIZE and NODE_RANK count if
    they are set. Without them all ranks are on this node, unless it has too few GPUs for them: then each GPU
    has a rank, since NCCL lets no two ranks share one.

    Raises:
        ClusterError: the launcher numbers the ranks otherwise.
    """
    try:
        found = read_placement(environ)
    except ClusterError:
        # Some of a launcher's variables are missing (RANK without LOCAL_RANK, say); the group has the rest.
        found = Placement("single")
    ranks, nodes = group.world_size, found.num_nodes
    if (found.rank, found.world_size) == (group.rank, ranks):
        return found
    if found.world_size > 1 and (found.local_world_size > 1 or ranks % nodes):
        raise ClusterError(
            f"the process group says rank {group.rank} of {ranks}, and {found.method} says rank "
            f"{found.rank} of {found.world_size}; give init_process_group the launcher's rank and "
            "world_size, or describe the ranks by DistributedConfig(...)"
        )

    def number(name: str, default: int, minimum: int = 0) -> int:
        # A launcher's variables belong to the process that spawned this process.
        own = environ if found.method == "single" else {}
        remedy = "set it to a number, or unset it"
        return whole_number(own, name, minimum=minimum, remedy=remedy, default=default)

    gpus = visible_gpus(environ) if nodes == 1 else 0
    size = number("LOCAL_WORLD_SIZE", ranks_here(ranks // nodes, gpus), 1)
    return replace(
        found,
        method="spawn",
        rank=group.rank,
        world_size=ranks,
        local_rank=number("LOCAL_RANK", group.rank % size),
        local_world_size=size,
        node_rank=number("NODE_RANK", found.node_rank if nodes > 1 else group.rank // size),
        num_nodes=-(-ranks // size),
        tasks_per_node=(size,) * (ranks // size) if ranks % size == 0 else (),
        master_addr=environ.get("MASTER_ADDR") or found.master_addr or LOOPBACK,
        master_port=port_of(environ),
        own_devices=False,
    )
