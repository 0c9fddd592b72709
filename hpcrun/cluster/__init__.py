"""Where we are: ranks, hosts, ports and time left, read from whatever launched this process.

A bottom room: it imports nothing of ours but the error classes, and never torch.
"""

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.cluster.errors import ClusterError

__all__ = ["ClusterError", "DistributedConfig"]
