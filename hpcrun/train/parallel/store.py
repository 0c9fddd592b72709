"""Key-value store of a run's ranks: rank 0 hosts it, and the other ranks connect to it."""

import datetime
import os
import queue
import socket
import threading
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import TCPStore

from hpcrun.ranks.addresses import bound_address, listen, outward_address
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.interfaces import gloo_interface, rendezvous_addresses
from hpcrun.ranks.launchers import LOOPBACK
from hpcrun.run.rendezvous import Rendezvous, RendezvousFile

_KEY = "hpcrun/rendezvous"
_NODE = "hpcrun/node"
_PEER = "hpcrun/peer"


def meet(
    config: DistributedConfig,
    rendezvous_file: RendezvousFile,
    ports: Sequence[int],
    *,
    interface: str | None,
    timeout: float,
) -> tuple[DistributedConfig, Any]:
    """Open the store of the attempt's ranks, and make gloo use the network on which they connected.

    Args:
        rendezvous_file: where rank 0 publishes its address.
        ports: ports that rank 0 tries in order.
        interface: ``job.interface``.
        timeout: seconds to connect, and for each request to the store.

    Returns:
        ``config`` with the address and port at which this rank reached the store, and the store.

    Raises:
        ClusterError: rank 0 can bind no port.
        RunError: rank 0 published nothing in time, or none of its addresses is reachable.
    """
    limit = datetime.timedelta(seconds=timeout)
    if config.rank == 0:
        address, store = _hold(config, rendezvous_file, listen(ports), interface, limit)
    else:
        address, store = rendezvous_file.meet(connect, timeout)
        store.set_timeout(limit)
    config = config.model_copy(update={"master_addr": address, "master_port": store.port})
    if config.launch_method == "slurm" and config.num_nodes > 1:
        os.environ.update(_network_of_gloo(config, store))
    return config, store


def _hold(
    config: DistributedConfig,
    rendezvous_file: RendezvousFile,
    listener: socket.socket,
    interface: str | None,
    limit: datetime.timedelta,
) -> tuple[str, Any]:
    """Create the store on rank 0, publish its addresses, and return the address that rank 0 itself uses."""
    addresses = rendezvous_addresses(os.environ, interface)
    address = next((name for name in addresses if bound_address(name)), LOOPBACK)
    store = TCPStore(
        address,
        listener.getsockname()[1],
        world_size=config.world_size,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        # torch owns and closes the descriptor from here on.
        master_listen_fd=listener.detach(),
    )
    rendezvous = Rendezvous(tuple(addresses), store.port)
    store.set(_KEY, rendezvous.key)
    store.set(_NODE, str(config.node_rank))
    rendezvous_file.publish(rendezvous)
    return address, store


def connect(
    address: str, rendezvous: Rendezvous, patience: float, *, handshake: float = 20.0
) -> tuple[str, Any] | None:
    """Connect to the run's store at ``address``; return None for another store or no answer.

    Args:
        patience: seconds to connect.
        handshake: minimum seconds for TCPStore's handshake; a program that is not a store does not answer it.
    """
    try:
        # Fail fast: TCPStore retries a refused connection until its timeout.
        socket.create_connection((address, rendezvous.port), timeout=patience).close()
        store = _open_store(address, rendezvous.port, max(patience, handshake))
        # The address may belong to the store of another job, which lacks this key.
        right = store.check([_KEY]) and store.get(_KEY).decode() == rendezvous.key
    except (OSError, UnicodeError, RuntimeError):
        return None
    return (address, store) if right else None


def _open_store(address: str, port: int, seconds: float) -> Any:
    """Connect to the store at ``address`` and ``port``.

    Raises:
        RuntimeError: no store answers; a silent server is given up after ``2 * seconds``.
    """
    opened: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def open_store() -> None:
        try:
            opened.put(
                TCPStore(
                    address,
                    port,
                    is_master=False,
                    timeout=datetime.timedelta(seconds=seconds),
                    wait_for_workers=False,
                )
            )
        except RuntimeError as error:
            opened.put(error)

    # TCPStore waits for the answer to its first ping without a limit (seen with torch 2.13). For a silent
    # server, this thread stays until the process ends.
    threading.Thread(target=open_store, name="hpcrun-store", daemon=True).start()
    try:
        store = opened.get(timeout=2 * seconds)
    except queue.Empty:
        raise RuntimeError(f"no store answers at {address} port {port}") from None
    if isinstance(store, RuntimeError):
        raise store
    return store


def _network_of_gloo(config: DistributedConfig, store: Any) -> dict[str, str]:
    """Return ``GLOO_SOCKET_IFNAME`` if gloo would not choose the network on which the ranks connected.

    Rank 0's node learns which of its networks the other nodes use only when one of them sends its address.
    """
    if store.get(_NODE).decode() != str(config.node_rank):
        peer = config.master_addr
        store.set(_PEER, outward_address([peer]) or "")
    elif "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    else:
        peer = store.get(_PEER).decode()
    return gloo_interface(os.environ, [peer] if peer else [])
