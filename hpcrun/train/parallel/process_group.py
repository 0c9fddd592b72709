"""The process group: joining it, leaving it, and the few questions that any code asks of it."""

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hpcrun.checkpoint.sharded.engine import WRITERS
from hpcrun.checkpoint.sharded.gloo_threads import GLOO_WORKERS, wait_until_idle
from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.cluster.errors import ClusterError
from hpcrun.cluster.hardware.devices import require_given_gpus
from hpcrun.cluster.network.ports import wanted_ports
from hpcrun.control.making import new_control_group
from hpcrun.control.tree_group import TreeGroup
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt
from hpcrun.run.rendezvous import MeetingBoard
from hpcrun.train.parallel.gpus import refuse_shared_gpus, require_gpu_build
from hpcrun.train.parallel.open_files import make_room
from hpcrun.train.parallel.store import meet


def setup_distributed(
    config: DistributedConfig | None = None, *, timeout: float = 600.0
) -> DistributedConfig:
    """Join the process group that the environment (or ``config``) describes, and return the description.

    For a loop of your own: the ranks meet at ``master_addr:master_port``. A single rank needs no
    group and makes none. A group that the program made by itself is kept.

    Args:
        timeout: seconds that a collective may take.

    Raises:
        ClusterError: the description contradicts itself or this machine, or without a ``config`` the job was
            given GPUs and sees none; `DistributedConfig.from_env(cpu=True)` trains on CPUs there. Or there
            is a group already, with another rank or size.
    """
    if config is None:
        require_given_gpus(os.environ)
        config = DistributedConfig.from_env()
    require_same_group(config)
    require_gpu_build(config)
    config.validate(visible_devices=torch.cuda.device_count())
    select_device(config)
    if config.world_size > 1 and not dist.is_initialized():
        os.environ.update(config.to_env_dict())
        dist.init_process_group(
            config.backend,
            rank=config.rank,
            world_size=config.world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
    return config


def require_same_group(config: DistributedConfig) -> None:
    """Check ``config`` against the process group, where there is one.

    Raises:
        ClusterError: the group has another rank or size, so that ranks would train models of their own.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if (rank, ranks) != (config.rank, config.world_size):
        raise ClusterError(
            f"this process is rank {rank} of {ranks} in its process group, and rank {config.rank} of "
            f"{config.world_size} in its DistributedConfig; make the group before the trainer and leave "
            "`distributed` out, or give both the same rank and world size"
        )


def join_run(
    config: DistributedConfig,
    run: RunDirectory,
    attempt: Attempt,
    *,
    timeout: float,
    interface: str | None = None,
) -> DistributedConfig:
    """Join the process group of a run's attempt; rank 0's bound port reaches the others through ``run``.

    Launchers that have set up a meeting place of their own (torchrun) keep it.

    Args:
        timeout: seconds to meet rank 0, and that a collective may take.
        interface: the network interfaces to use, as ``job.interface`` has them.

    Returns:
        ``config`` with the master's real address and port.

    Raises:
        ClusterError: no port could be bound, the description is wrong, or a GPU is missing or shared.
        RunError: rank 0 published nothing within ``timeout`` seconds, or cannot be reached.
    """
    require_gpu_build(config)
    meets = config.launch_method in ("slurm", "local") and config.world_size > 1
    config.validate(visible_devices=torch.cuda.device_count(), check_address=not meets)
    select_device(config)
    if config.world_size == 1:
        # No group, but the same variables: a task that reads RANK need not know how many there are.
        os.environ.update(config.to_env_dict())
        return config
    if not meets:
        return setup_distributed(config, timeout=timeout)
    if config.rank == 0 and (told := make_room(config.world_size)) is not None:
        print(f"hpcrun: {told}", flush=True)
    board = MeetingBoard(run, attempt, first=config.local_rank == 0)
    ports = wanted_ports(os.environ, attempt.owner)
    config, store = meet(config, board, ports, interface=interface, timeout=timeout)
    os.environ.update(config.to_env_dict())
    refuse_shared_gpus(config, store)
    dist.init_process_group(
        config.backend,
        store=store,
        rank=config.rank,
        world_size=config.world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    board.clear()
    return config


def control_group(config: DistributedConfig) -> Any:
    """A new CPU group of all ranks for decisions, apart from the gradients' collectives. Collective.

    Returns:
        The group, or None for a single rank.
    """
    return None if config.world_size == 1 else new_control_group()


@contextlib.contextmanager
def waiting_at_least(seconds: float) -> Iterator[None]:
    """Within the block no collective of any group is given up sooner: somebody else ends what hangs.

    But for those of the checkpoints' writers, on which nobody waits: a save that is given up is told, and
    training goes on.

    NCCL first sets a group up in its first collective. The others then wait for its first rank in the store,
    by the store's limit, which is raised too; what follows has no limit of torch's. So torch's source has it;
    no test covers NCCL.
    """
    before = [(backend._set_default_timeout, backend.options._timeout) for backend in _backends()]
    if dist.is_initialized():
        # The groups' stores are prefixes of this one, and share its connection with its limit.
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
    """What torch calls the process groups of which this rank is a member, but for trees of control."""
    return [group.group_name for group in _groups() if not isinstance(group, TreeGroup)]


def trees() -> list[TreeGroup]:
    """The control groups of this rank that are trees, which torch's flight recorders do not know."""
    return [group for group in _groups() if isinstance(group, TreeGroup)]


# Seconds that each rank adds to the limit for a connection: 164 s more at 8,192 ranks.
_CONNECTING = 0.02


def second_store(config: DistributedConfig, prefix: str, *, timeout: float = 10.0) -> Any:
    """A second connection to the ranks' key-value store, for a thread that must not wait for the first.

    All ranks connect in the same moment, and rank 0 accepts one after the other. The limit for the
    connection therefore grows with the number of ranks.

    Args:
        prefix: put before every key.
        timeout: seconds that a request may take.

    Returns:
        The store, or None for a single rank and where it cannot be reached.
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
        print(f"hpcrun: no second connection to rank 0's store: {error}", flush=True)
        return None
    store.set_timeout(datetime.timedelta(seconds=timeout))
    return PrefixStore(prefix, store)


def said_by_rank_zero(
    config: DistributedConfig, key: str, word: str, *, timeout: float = 60.0
) -> str:
    """Rank 0's ``word`` on all ranks, through the store that torchrun's agent holds before any group.

    Raises:
        RuntimeError: the store cannot be reached, or rank 0 said nothing within ``timeout`` seconds.
    """
    store = TCPStore(
        config.master_addr,
        config.master_port,
        is_master=False,
        timeout=datetime.timedelta(seconds=timeout),
        wait_for_workers=False,
    )
    if config.rank == 0:
        store.set(key, word)
        return word
    said: bytes = store.get(key)
    return said.decode()


def select_device(config: DistributedConfig) -> torch.device:
    """This rank's device, made the current one: local rank modulo visible devices, or the CPU."""
    if not config.device_ids:
        return torch.device("cpu")
    device = torch.device("cuda", config.device_ids[0])
    torch.cuda.set_device(device)
    return device


def cleanup_distributed() -> None:
    """Leave the process group, if there is one, for a process that may end right after it.

    A thread of gloo's hands back the tensors of a collective after those who waited for it went on, and
    needs the interpreter for that: at an interpreter's end it aborts the process.
    """
    if dist.is_available() and dist.is_initialized():
        wait_until_idle(GLOO_WORKERS)
        dist.destroy_process_group()


def get_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def get_world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_main_process() -> bool:
    """Whether this is rank 0, which logs and writes what is written once."""
    return get_rank() == 0


def _groups() -> list[Any]:
    # Also those that DeviceMesh makes for itself: torch lists them in no other place.
    return list(dist.distributed_c10d._world.pg_map)


def _backends() -> list[Any]:
    """Those of all groups whose time limit can be read and set, and is not the checkpoints' own."""
    waiting = [group for group in _groups() if group.group_desc != WRITERS]
    found = [group._get_backend(device) for group in waiting for device in group._device_types]
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL gloo's and NCCL's are wrapped in one without a setter.
    bare = {id(it): it for it in (getattr(one, "wrapped_pg", one) for one in found)}
    return [
        it
        for it in bare.values()
        if hasattr(it, "_set_default_timeout") and hasattr(getattr(it, "options", None), "_timeout")
    ]
