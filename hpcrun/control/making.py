"""The control group of a world: gloo's own full mesh for a small world, a tree for a large one."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hpcrun.control.tree_group import TreeGroup

FAN_OUT = 16
"""The most members of a small group of the tree, and the most ranks that are given a full mesh."""

_BACKEND = "hpcrun_tree"


def new_control_group(*, timeout: timedelta | None = None, description: str | None = None) -> Any:
    """A new group of all ranks for decisions on CPU tensors. Collective.

    Up to ``FAN_OUT`` ranks the group is gloo's own, with a connection between any two ranks. Above, the
    group is a tree: the connections of a rank grow with the logarithm of the number of ranks.

    Args:
        timeout: how long a collective may take; None: torch's default, 30 minutes.
        description: torch's name for what the group is for.
    """
    if dist.get_world_size() <= FAN_OUT:
        return dist.new_group(backend="gloo", timeout=timeout, group_desc=description)
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _make_tree, devices=["cpu"])
    return dist.new_group(backend=_BACKEND, timeout=timeout, group_desc=description)


def _make_tree(store: Any, rank: int, size: int, timeout: timedelta) -> TreeGroup:
    return TreeGroup(store, rank, size, timeout, fan_out=FAN_OUT)
