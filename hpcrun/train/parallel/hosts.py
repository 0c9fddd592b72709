"""Ranks on several hosts without Slurm: one name for their attempt, and the network between the hosts.

A separate launcher starts the ranks of each host. The ranks agree through the key-value store at MASTER_ADDR
and MASTER_PORT before any process group exists: the name of the attempt names the folder of its records.
"""

import datetime
import os
import socket
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import TCPStore

from hpcrun.drafts import process_space
from hpcrun.errors import ClusterError
from hpcrun.ranks.addresses import bound_address, is_loopback, outward_address
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.interfaces import gloo_interface

_JOB = "hpcrun/job"
_PEER = "hpcrun/peer-of-rank-0"

# The process group of this process uses the same server: torch ends it with the last store.
_stores: list[Any] = []


def needs_hosts(config: DistributedConfig) -> bool:
    """Return True if several launchers, each on its own host, have started the ranks."""
    return config.num_nodes > 1 and config.launch_method == "torchrun"


def agree_on_job(config: DistributedConfig, choose: Callable[[], str], *, timeout: float) -> str:
    """Return the name that rank 0 gets from ``choose``, on all ranks. Collective.

    A restart by torchrun has the same name.

    Args:
        choose: returns a name in place of a job id; called on rank 0 only.
        timeout: seconds to reach rank 0's host, and to wait for the name.

    Raises:
        ClusterError: rank 0's host cannot be reached, or another process has this process's rank.
    """
    try:
        store = _open(config, timeout)
        _refuse_second(config, store)
        if config.rank == 0 and not store.check([_JOB]):
            store.set(_JOB, choose())
        name: bytes = store.get(_JOB)
        os.environ.update(_network_of_gloo(config, store))
    except RuntimeError as error:
        raise _unreachable(config, timeout, error) from error
    return name.decode()


def use_reachable_network(config: DistributedConfig, *, timeout: float) -> None:
    """Make gloo bind an address that the other hosts can reach, if it would bind loopback here. Collective.

    Debian's hosts file leads the host's own name to 127.0.1.1, and gloo binds the address of this name.

    Args:
        timeout: seconds to reach rank 0's host, and to wait for an address of another host.

    Raises:
        ClusterError: rank 0's host cannot be reached.
    """
    try:
        os.environ.update(_network_of_gloo(config, _open(config, timeout)))
    except RuntimeError as error:
        raise _unreachable(config, timeout, error) from error


def _open(config: DistributedConfig, timeout: float) -> Any:
    """Connect to the store of torchrun's agent; without an agent, rank 0 makes a store for all ranks."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        config.master_addr,
        config.master_port,
        is_master=config.rank == 0 and not agent,
        timeout=datetime.timedelta(seconds=timeout),
        wait_for_workers=False,
        # torch's own store at this port then shares the server.
        multi_tenant=True,
    )
    _stores[:] = [store]
    return store


def _refuse_second(config: DistributedConfig, store: Any) -> None:
    """Raise ClusterError if another launcher has started a process with this rank."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    own = f"{process_space()} process {os.getppid() if agent else os.getpid()}"
    key = f"hpcrun/{config.restart_count}/rank/{config.rank}"
    holder = store.compare_set(key, "", own).decode()
    if holder != own:
        raise ClusterError(
            f"rank {config.rank} at {config.master_addr} port {config.master_port} is {holder} already: this "
            "run is live, or two hosts have the same node rank; wait for its end, or correct --node-rank"
        )


def _network_of_gloo(config: DistributedConfig, store: Any) -> dict[str, str]:
    """Return ``GLOO_SOCKET_IFNAME`` if gloo would not choose the network on which the hosts connected.

    The host of rank 0 learns which of its networks the others use only from the address of one of them.
    """
    if config.node_rank:
        peer = config.master_addr
        store.set(_PEER, outward_address([peer]) or "")
    else:
        peer = store.get(_PEER).decode()
    return gloo_interface(os.environ, [peer] if peer else [], several=True)


def binds_loopback() -> bool:
    """Return True if gloo would bind an address that no other host can reach."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return False
    bound = bound_address(socket.gethostname())
    return bound is None or is_loopback(bound)


def _unreachable(config: DistributedConfig, timeout: float, error: RuntimeError) -> ClusterError:
    reason = (str(error).splitlines() or [""])[0]
    return ClusterError(
        f"rank {config.rank} on {socket.gethostname()}: no answer of rank 0 at {config.master_addr} port "
        f"{config.master_port} within {timeout:.0f} s ({reason}); start all hosts, check MASTER_ADDR and "
        "MASTER_PORT, and open this port in the firewall"
    )
