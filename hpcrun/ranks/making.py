"""Make the control group: gloo's own full mesh for few ranks, a tree for many."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hpcrun.ranks.tree_group import TreeGroup

FAN_OUT = 16
"""Maximum members of a small group in the tree, and maximum ranks in a full mesh."""

_BACKEND = "hpcrun_tree"


def new_control_group(*, timeout: timedelta | None = None, description: str | None = None) -> Any:
    """Make a group of all ranks for decisions on CPU tensors. Collective.

    With up to ``FAN_OUT`` ranks it is a gloo group, with a connection between any two ranks. With more
    ranks it is a tree: the connections of a rank grow with the logarithm of the number of ranks.

    Args:
        timeout: limit for a collective; None: torch's default, 30 minutes.
        description: torch's description of the group's purpose.
    """
    if dist.get_world_size() <= FAN_OUT:
        return dist.new_group(backend="gloo", timeout=timeout, group_desc=description)
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _make_tree, devices=["cpu"])
    return dist.new_group(backend=_BACKEND, timeout=timeout, group_desc=description)


def _make_tree(store: Any, rank: int, size: int, timeout: timedelta) -> TreeGroup:
    return TreeGroup(store, rank, size, timeout, fan_out=FAN_OUT)
