"""The environment of this process: ranks, hosts, ports and remaining time, read from its launcher.

A base package: it imports nothing of hpcrun but the error classes, and never torch.
"""

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.cluster.errors import ClusterError

__all__ = ["ClusterError", "DistributedConfig"]
