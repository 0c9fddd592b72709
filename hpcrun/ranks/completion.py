"""The values of a DistributedConfig that follow from others, or from the launcher's variables."""

import os
from collections.abc import Mapping
from typing import Any

from hpcrun.devices.devices import visible_gpus
from hpcrun.errors import ClusterError
from hpcrun.ranks.existing_group import made_group, place_in_group
from hpcrun.slurm.placement import read_placement


def completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a DistributedConfig with those that follow from them, and without None.

    Raises:
        ClusterError: the rank is None, and the launcher's variables are wrong or contradict a value.
    """
    values = {key: value for key, value in given.items() if value is not None}
    if "rank" in given and given["rank"] is None:
        values = {**_of_launcher(values), **values}

    def number(name: str, default: int) -> int:
        found = values.get(name, default)
        # Text of a file, such as a quoted number; other values are refused later.
        return int(found) if str(found).isdecimal() else default

    ranks, nodes, rank = number("world_size", 1), number("num_nodes", 1), number("rank", 0)
    size = number("num_gpus_per_node", max(1, -(-ranks // max(1, nodes))))
    if "world_size" in values:
        values.setdefault("num_gpus_per_node", size)
    if size and nodes > 1 and "tasks_per_node" not in values and rank < size * nodes:
        values.setdefault("node_rank", rank // size)
    before = number("node_rank", 0) * size
    if before <= rank < before + size:
        values.setdefault("local_rank", rank - before)
    # No device at all is a choice for CPUs.
    on_cpu = "device_ids" in values and not values["device_ids"]
    known = on_cpu or {"backend", "device_ids"} <= values.keys()
    gpus = 0 if known else visible_gpus(os.environ)
    values.setdefault("backend", "nccl" if gpus else "gloo")
    if gpus and values["backend"] == "nccl":
        values.setdefault("device_ids", (number("local_rank", 0) % gpus,))
    return values


def _of_launcher(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return this process's place among the ranks; raises ClusterError for ``values`` of other ranks."""
    group = made_group()
    placement = place_in_group(group, os.environ) if group else read_placement(os.environ)
    ranks = values.get("world_size")
    if placement.method == "single":
        # The program starts the ranks itself, and reads the file before.
        return {"launch_method": "spawn"} if str(ranks or 1) != "1" else {}
    if ranks is not None and str(ranks) != str(placement.world_size):
        raise ClusterError(
            f"world_size is {ranks}, and {placement.method} has started {placement.world_size} rank(s); "
            "start that many ranks, or set world_size to null"
        )
    return {
        "world_size": placement.world_size,
        "rank": placement.rank,
        "local_rank": placement.local_rank,
        "num_nodes": placement.num_nodes,
        "node_rank": placement.node_rank,
        "num_gpus_per_node": placement.local_world_size,
        "tasks_per_node": placement.tasks_per_node,
        "launch_method": placement.method,
        "own_devices": placement.own_devices,
        **({"master_addr": placement.master_addr} if placement.master_addr else {}),
        **({"master_port": placement.master_port} if placement.master_port else {}),
    }
