"""Process group and key-value store of the ranks: join, leave, and query rank, world size and groups."""

import contextlib
import datetime
import os
import queue
import resource
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hpcrun.checkpoint.sharded.engine import WRITERS
from hpcrun.checkpoint.sharded.idle_threads import GLOO_WORKERS, wait_until_idle
from hpcrun.devices import accelerator, vendor
from hpcrun.devices.devices import require_given_gpus, visible_gpus
from hpcrun.errors import ClusterError, NotTrainable
from hpcrun.ranks.addresses import bound_address, listen, outward_address, wanted_ports
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.interfaces import gloo_interface, rendezvous_addresses
from hpcrun.ranks.tree_group import TreeGroup, new_control_group
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.rendezvous import Rendezvous, RendezvousFile
from hpcrun.slurm.placement import LOOPBACK
from hpcrun.train.parallel.ended_ranks import leave_ranks
from hpcrun.train.parallel.hosts import (
    binds_loopback,
    needs_hosts,
    use_reachable_network,
)


def setup_distributed(
    config: DistributedConfig | None = None, *, timeout: float = 600.0
) -> DistributedConfig:
    """Join the process group that the environment (or ``config``) describes, and return the description.

    For your own training loop: the ranks connect to ``master_addr:master_port``, and a rank with a GPU makes
    it the current device. A single rank needs no group and makes none. A group that the program has already
    made is kept. Collective; source: ``torch.distributed.init_process_group``.

    Args:
        config: rank, world size and address; None: those of the launcher's variables.
        timeout: seconds that a collective may take.

    Raises:
        ClusterError: the description contradicts itself, this machine or an existing group (another rank or
            size). Or ``config`` is None and the job was given GPUs but sees none;
            `DistributedConfig.from_env(cpu=True)` trains on CPUs there.
    """
    if config is None:
        require_given_gpus(os.environ)
        config = DistributedConfig.from_env()
    require_same_group(config)
    require_gpu_build(config)
    config.validate(visible_devices=accelerator.count())
    select_device(config)
    if config.world_size > 1 and not dist.is_initialized():
        os.environ.update(config.to_env_dict())
        if needs_hosts(config) and binds_loopback():
            use_reachable_network(config, timeout=timeout)
        dist.init_process_group(
            config.backend,
            rank=config.rank,
            world_size=config.world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
    return config


def require_same_group(config: DistributedConfig) -> None:
    """Check ``config`` against the process group, if there is one.

    Raises:
        ClusterError: the group has another rank or size, so the ranks would train separate models.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if (rank, ranks) != (config.rank, config.world_size):
        raise ClusterError(
            f"this process is rank {rank} of {ranks} in its process group, but rank {config.rank} of "
            f"{config.world_size} in its DistributedConfig; make the group before the trainer and omit "
            "`distributed`, or give both the same rank and world size"
        )


def join_run(
    config: DistributedConfig,
    run: RunDirectory,
    attempt: Attempt,
    *,
    timeout: float,
    interface: str | None = None,
) -> DistributedConfig:
    """Join the process group of a run's attempt; rank 0 publishes its bound port in ``run``.

    Launchers with their own rendezvous (torchrun) keep it.

    Args:
        timeout: seconds to reach rank 0, and seconds that a collective may take.

    Returns:
        ``config`` with the master's real address and port.

    Raises:
        ClusterError: no port could be bound, the description is wrong, or a GPU is missing.
        RunError: rank 0 published nothing within ``timeout`` seconds, or cannot be reached.
    """
    require_gpu_build(config)
    meets = config.launch_method in ("slurm", "local") and config.world_size > 1
    config.validate(visible_devices=accelerator.count(), check_address=not meets)
    select_device(config)
    if config.world_size == 1:
        # No group, but the same variables, for tasks that read RANK or WORLD_SIZE.
        os.environ.update(config.to_env_dict())
        return config
    if not meets:
        return setup_distributed(config, timeout=timeout)
    if config.rank == 0:
        allow_connections(config.world_size)
    rendezvous_file = RendezvousFile(run, attempt, ranks=config.world_size)
    ports = wanted_ports(os.environ, attempt.owner)
    config, store = meet(config, rendezvous_file, ports, interface=interface, timeout=timeout)
    os.environ.update(config.to_env_dict())
    dist.init_process_group(
        config.backend,
        store=store,
        rank=config.rank,
        world_size=config.world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    return config


def connect(device: torch.device, group: Any = None) -> None:
    """Make the first collective between the GPUs, so that a broken network shows before a step. Collective.

    ``group``: None for the group of all ranks.

    ``device_id`` of ``init_process_group`` would connect them before the watchdog watches. It also lets
    every rank outside a new gloo group wait in NCCL for the ranks inside (torch 2.13).
    """
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        accelerator.synchronize(device)


def control_ranks(config: DistributedConfig) -> Ranks:
    """Make a CPU group of all ranks for decisions, separate from the gradients' collectives. Collective.

    Returns:
        This rank's view of the group; the group is None for a single rank.
    """
    group = None if config.world_size == 1 else new_control_group()
    return Ranks(config.rank, config.world_size, group)


@contextlib.contextmanager
def waiting_at_least(seconds: float) -> Iterator[None]:
    """Raise the timeout of every group's collectives to ``seconds`` or more within the block.

    Used while the watchdog ends hangs. The groups of the checkpoint writers keep their timeout: no rank
    waits for them, and training continues after a failed save, which is reported.

    NCCL sets up a group in its first collective. The other ranks then wait for the group's first rank in
    the store, with the store's timeout, which is raised too; the rest of the setup has no timeout in torch.
    This is from torch's source; no test covers NCCL.
    """
    before = [(backend._set_default_timeout, backend.options._timeout) for backend in _backends()]
    if dist.is_initialized():
        # The groups' stores are prefixes of this store, and share its connection and timeout.
        store: Any = dist.distributed_c10d._get_default_store()
        before.append((store.set_timeout, store.timeout))
    least = datetime.timedelta(seconds=seconds)
    for set_limit, limit in before:
        set_limit(max(limit, least))
    try:
        yield
    finally:
        for set_limit, limit in before:
            set_limit(limit)


def group_names() -> list[str]:
    """Return torch's names of the process groups of this rank, without control trees."""
    return [group.group_name for group in _groups() if not isinstance(group, TreeGroup)]


def trees() -> list[TreeGroup]:
    """Return this rank's control groups that are trees; torch's flight recorder does not know them."""
    return [group for group in _groups() if isinstance(group, TreeGroup)]


# Seconds per rank to add to the connection timeout: 164 s more at 8,192 ranks.
_CONNECTING = 0.02


def second_store(config: DistributedConfig, prefix: str, *, timeout: float = 10.0) -> Any:
    """Open a second connection to the ranks' key-value store, for a thread that must not block the first.

    All ranks connect at the same moment, and rank 0 accepts one connection after the other. The timeout for
    connecting therefore grows with the number of ranks.

    Args:
        timeout: seconds that a request may take.

    Returns:
        The store, or None for a single rank and if the store cannot be reached.
    """
    if config.world_size == 1:
        return None
    try:
        store = TCPStore(
            config.master_addr,
            config.master_port,
            is_master=False,
            timeout=datetime.timedelta(seconds=timeout + config.world_size * _CONNECTING),
        )
    except RuntimeError as error:
        print(f"hpcrun: cannot open a second connection to rank 0's store: {error}", flush=True)
        return None
    store.set_timeout(datetime.timedelta(seconds=timeout))
    return PrefixStore(prefix, store)


def select_device(config: DistributedConfig) -> torch.device:
    """Make this rank's device the current device and return it: its GPU, or the CPU."""
    if not config.device_ids:
        return torch.device("cpu")
    device = accelerator.device(config.device_ids[0])
    accelerator.make_current(device)
    return device


def cleanup_distributed() -> None:
    """Leave the process group, if there is one; call this function before the process ends.

    After training steps of a loop of yours, the rank waits until all ranks call this function, at most the
    timeout of the group. Thus a rank that has fewer batches than the others does not end as if all was well.

    A gloo thread releases the tensors of a collective only after its callers have continued, and needs the
    interpreter for that: during interpreter shutdown this would abort the process.

    Raises:
        UserError: another rank waits in a step for a rank that has ended; the text names both.
    """
    try:
        leave_ranks()
    finally:
        if dist.is_available() and dist.is_initialized():
            wait_until_idle(GLOO_WORKERS)
            dist.destroy_process_group()


def get_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main_process() -> bool:
    """Return True on rank 0, which logs and writes files that exist once per run; True without a group."""
    return get_rank() == 0


def _groups() -> list[Any]:
    # Includes groups that DeviceMesh makes; torch lists those nowhere else.
    return list(dist.distributed_c10d._world.pg_map)


def _backends() -> list[Any]:
    """Return the backends with an adjustable timeout, without those of the checkpoint writers."""
    waiting = [group for group in _groups() if group.group_desc != WRITERS]
    found = [group._get_backend(device) for group in waiting for device in group._device_types]
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps gloo's and NCCL's backends in a class without a setter.
    bare = {id(it): it for it in (getattr(one, "wrapped_pg", one) for one in found)}
    return [
        it
        for it in bare.values()
        if hasattr(it, "_set_default_timeout") and hasattr(getattr(it, "options", None), "_timeout")
    ]


_A_RANK = 2
"""Connections per rank to rank 0's key-value store: torch's, and the watchdog's."""

_BESIDE = 512
"""File descriptors for everything else: data, logs, the training's own connections."""


def allow_connections(world_size: int) -> None:
    """Raise this process's limit of open files to what rank 0 needs, as far as the hard limit allows.

    Slurm gives a job the limit of the shell that submitted it, often 1,024. Ranks beyond it could not
    connect.
    """
    wanted = _A_RANK * world_size + _BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        print(
            f"hpcrun: rank 0 may open {allowed} files but needs about {wanted} for {world_size} ranks; ask "
            "the site to raise the hard limit (ulimit -Hn) on the nodes",
            flush=True,
        )


def require_gpu_build(config: DistributedConfig) -> None:
    """Check that torch sees a GPU if the node has one for this rank.

    Raises:
        NotTrainable: torch is built for CPUs; with the remedy.
        ClusterError: torch sees none of the GPUs; with the remedy.
    """
    if config.backend != "nccl" or accelerator.count():
        return
    where = f"{socket.gethostname()}: the node has {visible_gpus(os.environ)} GPU(s) for rank {config.rank}"
    built = vendor.build()
    if built is None:
        # The build is the same on all nodes, so another start cannot help.
        raise NotTrainable(
            f"{where}, but torch {torch.__version__} is built without CUDA and ROCm; install a build with "
            "one of them (https://pytorch.org/get-started), or train on CPUs (--cpu)"
        )
    raise ClusterError(
        f"{where}, but torch (built for {' '.join(built)}) sees none; in a container pass the GPUs through "
        "(apptainer: --nv, or --rocm); otherwise check that the driver is new enough for this build and "
        "that CUDA_VISIBLE_DEVICES names the right GPUs; or train on CPUs (--cpu)"
    )


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
        address, store = rendezvous_file.meet(connect_store, timeout)
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


def connect_store(
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
