"""Rank, world size and rendezvous address of this process, for every launcher.

All communication between ranks starts from a DistributedConfig, so mistakes of launchers
and batch scripts are reported here in one line, and not as a hang in the first all-reduce.
"""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hpcrun.devices.devices import lists_mig, visible_gpus
from hpcrun.errors import ClusterError
from hpcrun.ranks.addresses import port_candidates
from hpcrun.ranks.completion import completed
from hpcrun.ranks.existing_group import made_group, place_in_group
from hpcrun.slurm.placement import (
    LOOPBACK,
    LaunchMethod,
    Placement,
    ranks_here,
    read_placement,
)

Backend = Literal["nccl", "gloo"]

_BY_HAND = ("RANK", "WORLD_SIZE")
_NUMBERS = (
    *("world_size", "rank", "local_rank", "master_port", "num_nodes", "node_rank"),
    *("num_gpus_per_node", "bucket_mb", "restart_count"),
)


class DistributedConfig(BaseModel):
    """This rank's place among the ranks, and the address of the rendezvous. Immutable.

    ``from_env`` fills it from the launcher's variables, ``from_file`` from a YAML or JSON file; a program
    without a launcher may fill it by hand. It only contains values: it opens nothing, and ``validate`` checks
    the values. It unpacks into rank, world size and local rank: ``rank, world_size, local_rank =
    setup_distributed()``.

    Values that are absent or None follow from the others. ``rank`` and ``world_size``: from the launcher's
    variables if the rank is None, otherwise a single rank. ``num_gpus_per_node``: the ranks divided by the
    nodes. ``node_rank`` and ``local_rank``: from the rank, for nodes that are filled one after the other.
    ``backend``: nccl if a GPU is visible and ``device_ids`` is not empty, otherwise gloo. ``device_ids``:
    with nccl, the GPU with the number of the local rank. ``launch_method="torch.distributed.launch"`` is
    stored as ``torchrun``, which that launcher starts.

    Raises:
        pydantic.ValidationError: a field is unknown, has the wrong type, or is out of its range.
        ClusterError: the rank is None, and the launcher's variables are wrong or contradict a value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    world_size: int = Field(default=1, ge=1, description="Ranks in all.")
    rank: int = Field(default=0, ge=0, description="This process among all ranks.")
    local_rank: int = Field(default=0, ge=0, description="This process on its node.")
    backend: Backend = Field(default="gloo", description="nccl on GPUs, gloo on CPUs.")
    master_addr: str = Field(default=LOOPBACK, min_length=1, description="Host of rank 0.")
    master_port: int = Field(default=29500, ge=1, le=65535, description="Port rank 0 listens on.")
    num_nodes: int = Field(default=1, ge=1, description="Nodes of the job or step.")
    node_rank: int = Field(default=0, ge=0, description="This node, in Slurm's order.")
    num_gpus_per_node: int = Field(default=1, ge=1, description="Ranks on this node.")
    device_ids: tuple[int, ...] = Field(default=(), description="This rank's GPU; none on CPUs.")
    find_unused_parameters: bool = Field(default=False, description="As in torch's DDP.")
    broadcast_buffers: bool = Field(default=True, description="As in torch's DDP.")
    gradient_as_bucket_view: bool = Field(default=True, description="As in torch's DDP.")
    bucket_mb: float | None = Field(
        default=None, gt=0, description="MiB of gradients per all-reduce; None: chosen by hpcrun."
    )
    launch_method: LaunchMethod = Field(default="single", description="What started this rank.")
    tasks_per_node: tuple[int, ...] = Field(
        default=(), description="Ranks of each node, by node rank; empty if unknown."
    )
    own_devices: bool = Field(
        default=False, description="The scheduler shows this rank GPUs that no other rank sees."
    )
    job_id: str | None = Field(default=None, description="The job's id, ARRAY_TASK in arrays.")
    restart_count: int = Field(default=0, ge=0, description="Restarts of this job so far.")

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, values: Any) -> Any:
        return completed(values) if isinstance(values, dict) else values

    @field_validator(*_NUMBERS, mode="before")
    @classmethod
    def _no_booleans(cls, value: Any) -> Any:
        # Python's True is the number 1, so `world_size: true` would train one rank.
        if isinstance(value, bool):
            raise ValueError(f"should be a number, not {str(value).lower()}")
        return value

    @field_validator("launch_method", mode="before")
    @classmethod
    def _launcher(cls, value: Any) -> Any:
        return "torchrun" if value == "torch.distributed.launch" else value

    @classmethod
    def from_file(cls, path: str | Path, *, rank: int | None = None) -> "DistributedConfig":
        """Read a YAML or JSON file: keys with the names of the fields, or a section ``parallel`` of them.

        ``rank: null`` is the rank that the launcher gives to this process; without a launcher it is ``rank``,
        or 0 in a program that starts the ranks itself. A file with such a section may have other settings
        too.

        Args:
            path: the file, with a name that ends in .yaml, .yml or .json.
            rank: this process among all ranks, in a function of ``torch.multiprocessing.spawn``.

        Raises:
            ConfigError: the file cannot be read, a key is unknown, or a value is wrong; a line for each, with
                the file, the line, the key and the remedy.
        """
        from hpcrun.ranks.config_file import read_config

        given = {} if rank is None else {"rank": rank}
        return read_config(
            Path(path), [*cls.model_fields], lambda values: cls.model_validate(values | given)
        )

    def to_file(self, path: str | Path) -> None:
        """Write all fields to a file that :meth:`from_file` reads, all or nothing.

        Args:
            path: the file; its suffix .yaml, .yml or .json decides the format.

        Raises:
            ConfigError: the suffix is not .yaml, .yml or .json, or the file cannot be written.
        """
        from hpcrun.ranks.config_file import write_config

        write_config(Path(path), self.model_dump(mode="json"))

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]
        """Return rank, world size and local rank."""
        return iter((self.rank, self.world_size, self.local_rank))

    @classmethod
    def from_values(
        cls,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        backend: Backend | None = None,
        device_ids: Sequence[int] | None = None,
    ) -> "DistributedConfig":
        """Return the launcher's description, changed by the values that a program gives.

        Without a launcher the program has started the ranks, as with ``torch.multiprocessing.spawn``: all of
        them on this machine, or one for each GPU of several equal machines. Address and port are then
        MASTER_ADDR and MASTER_PORT, or the defaults.

        Args:
            rank: this process among all ranks; None: the launcher's.
            world_size: number of ranks; None: the launcher's.
            backend: ``nccl`` or ``gloo``; None: ``nccl`` with a GPU.
            device_ids: this rank's GPU, as ``[0]``; None: chosen by the local rank.

        Raises:
            ClusterError: rank or world size contradict the launcher, or only one of both is given without a
                launcher.
            pydantic.ValidationError: a value has the wrong type, or is out of its range.
        """
        environ: Mapping[str, str] = os.environ
        if None not in (rank, world_size) and "LOCAL_RANK" not in os.environ:
            # Set by hand for a machine: the machine's first rank, say. The program knows its own rank.
            environ = {name: os.environ[name] for name in os.environ if name not in _BY_HAND}
        found = cls.from_env(environ)
        changes: dict[str, Any] = {}
        if found.launch_method == "single" and (rank, world_size) != (None, None):
            if rank is None or world_size is None:
                raise ClusterError(
                    "no launcher's variables are set, so that rank and world_size belong together: give both"
                )
            size = ranks_here(world_size, visible_gpus(os.environ))
            changes = {
                **{"rank": rank, "world_size": world_size, "local_rank": rank % size},
                **{"node_rank": rank // size, "num_nodes": world_size // size},
                **{"num_gpus_per_node": size, "tasks_per_node": (size,) * (world_size // size)},
                "launch_method": "spawn",
                "master_addr": os.environ.get("MASTER_ADDR", LOOPBACK),
                "master_port": os.environ.get("MASTER_PORT", found.master_port),
                "device_ids": (rank % visible_gpus(os.environ),) if found.device_ids else (),
            }
        for name, given in (("rank", rank), ("world_size", world_size)):
            reported = changes.get(name, getattr(found, name))
            if given not in (None, reported):
                raise ClusterError(
                    f"{name}={given} contradicts {name} {reported} of the launcher ({found.launch_method}); "
                    f"leave {name} out, or correct the launcher's variables"
                )
        changes |= {} if backend is None else {"backend": backend}
        changes |= {} if device_ids is None else {"device_ids": tuple(device_ids)}
        return cls.model_validate(found.model_dump() | changes)

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] = os.environ,
        *,
        cpu: bool = False,
        visible_devices: int | None = None,
    ) -> "DistributedConfig":
        """Read the launcher's variables, and the process group if the program has created one.

        Rank and world size then come from the group. The port is MASTER_PORT if that is set, and
        otherwise the first of the job's candidates, which rank 0 still has to probe (see ``ports``).

        Args:
            environ: the environment of this rank.
            cpu: use gloo and no device even if there are GPUs.
            visible_devices: GPUs that this process sees; None: counted without torch.

        Raises:
            ClusterError: variables are missing, malformed, or contradict each other or the group.
        """
        gpus = visible_gpus(environ) if visible_devices is None else visible_devices
        on_gpu = gpus > 0 and not cpu
        group = made_group()
        placement = place_in_group(group, environ) if group else read_placement(environ)
        return cls(
            world_size=placement.world_size,
            rank=placement.rank,
            local_rank=placement.local_rank,
            backend="nccl" if on_gpu and (group is None or group.nccl) else "gloo",
            master_addr=_master_addr(placement),
            master_port=placement.master_port or port_candidates(placement.job_id or "hpcrun")[0],
            num_nodes=placement.num_nodes,
            node_rank=placement.node_rank,
            num_gpus_per_node=placement.local_world_size,
            device_ids=(placement.local_rank % gpus,) if on_gpu else (),
            launch_method=placement.method,
            tasks_per_node=placement.tasks_per_node,
            own_devices=placement.own_devices,
            job_id=placement.job_id,
            restart_count=placement.restart_count,
        )

    def to_env_dict(self) -> dict[str, str]:
        """Return the environment variables of ``torch.distributed``'s ``env://`` and of torchrun.

        Source: the sections "Environment Variables" of the torchrun page and "Environment variable
        initialization" of the ``torch.distributed`` page.
        """
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.num_gpus_per_node),
            "NODE_RANK": str(self.node_rank),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    def validate(  # type: ignore[override]
        self, *, visible_devices: int | None = None, check_address: bool = True
    ) -> Literal[True]:
        """Check that the values fit together and fit this machine.

        The method replaces pydantic's deprecated class method of the same name.

        Args:
            visible_devices: GPUs that this process sees; None: counted without torch.
            check_address: check that the master address resolves here.

        Returns:
            True; a problem raises.

        Raises:
            ClusterError: one line about the first problem.
        """
        self._check_ranks()
        if self.backend == "nccl":
            gpus = visible_gpus(os.environ) if visible_devices is None else visible_devices
            self._check_devices(gpus)
        if check_address:
            self._check_address()
        return True

    def _check_address(self) -> None:
        try:
            socket.getaddrinfo(self.master_addr, self.master_port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ClusterError(
                f"master address {self.master_addr!r} does not resolve on {socket.gethostname()} "
                f"({error}); add it to DNS or /etc/hosts, or set MASTER_ADDR to the host's IP address"
            ) from error

    def _check_ranks(self) -> None:
        where = f"rank {self.rank} ({self.launch_method})"
        tasks, nodes, node = self.tasks_per_node, self.num_nodes, self.node_rank
        per_node = self.num_gpus_per_node
        if any(device < 0 for device in self.device_ids):
            raise ClusterError(f"{where}: device_ids {list(self.device_ids)}: devices count from 0")
        if self.rank >= self.world_size:
            raise ClusterError(
                f"{where}: the rank is not below the world size {self.world_size}; "
                "ranks count from 0, so start world-size processes"
            )
        if node >= nodes:
            raise ClusterError(
                f"{where}: node rank {node} is not below the {nodes} node(s); node ranks count from 0"
            )
        if self.local_rank >= per_node:
            raise ClusterError(
                f"{where}: local rank {self.local_rank} is not below the {per_node} "
                "task(s) on this node; start that many tasks on it"
            )
        if tasks and len(tasks) != nodes:
            raise ClusterError(
                f"{where}: {len(tasks)} task counts for {nodes} node(s); give one count for each node"
            )
        if tasks and sum(tasks) != self.world_size:
            raise ClusterError(
                f"{where}: the world size is {self.world_size} but the nodes have "
                f"{'+'.join(map(str, tasks))} = {sum(tasks)} tasks; start all of them in one step"
            )
        if tasks and tasks[node] != per_node:
            raise ClusterError(
                f"{where}: {per_node} task(s) on this node, but the list of nodes "
                f"says {tasks[node]} for node {node}; make them agree"
            )
        # Among the launchers without a list of tasks, only torchrun has nodes of different sizes.
        unequal = self.launch_method == "torchrun" and nodes > 1
        if not tasks and not unequal and self.world_size != nodes * per_node:
            raise ClusterError(
                f"{where}: the world size is {self.world_size}, but {nodes} node(s) of {per_node} rank(s) "
                f"are {nodes * per_node}; correct world_size, num_nodes or num_gpus_per_node, or give "
                "tasks_per_node where nodes differ"
            )
        self._check_place(where)
        if len(self.device_ids) > 1:
            raise ClusterError(
                f"{where}: device_ids {list(self.device_ids)} names {len(self.device_ids)} GPUs, and a rank "
                f"drives one; give device_ids=({self.device_ids[0]},) and start a rank for each GPU"
            )

    def _check_place(self, where: str) -> None:
        """Compare the rank with its place, for both orders in which launchers fill nodes: block or cyclic."""
        node, local, nodes = self.node_rank, self.local_rank, self.num_nodes
        tasks = self.tasks_per_node
        equal = self.num_gpus_per_node * nodes == self.world_size
        # srun has further orders (--distribution); its variables are right.
        if self.launch_method in ("slurm", "local") or not (tasks or equal):
            return
        filled = sum(tasks[:node]) if tasks else node * self.num_gpus_per_node
        if self.rank == filled + local or (equal and self.rank == local * nodes + node):
            return
        raise ClusterError(
            f"{where}: local rank {local} on node {node} of {nodes} is rank {filled + local}; correct rank, "
            "local_rank or node_rank (LOCAL_RANK, LOCAL_WORLD_SIZE and NODE_RANK in the environment)"
        )

    def _check_devices(self, gpus: int) -> None:
        where = f"rank {self.rank} on {socket.gethostname()}"
        if gpus == 0:
            raise ClusterError(
                f"{where}: the nccl backend needs a GPU and CUDA shows none; request GPUs "
                "(--gpus-per-node), check CUDA_VISIBLE_DEVICES, or train on CPUs (--cpu)"
            )
        if self.num_gpus_per_node > gpus and lists_mig(os.environ):
            raise ClusterError(
                f"{where}: {self.num_gpus_per_node} ranks on this node, but the visible devices are slices "
                "of a GPU (MIG), and CUDA shows one slice to a process, and NCCL uses none; request one rank "
                "per node (--gpus 1), or whole GPUs"
            )
        if self.num_gpus_per_node > gpus and not self.own_devices:
            raise ClusterError(
                f"{where}: {self.num_gpus_per_node} ranks on this node but {gpus} visible GPU(s), "
                "so two ranks would share a GPU; start at most that many tasks per node, request more "
                "GPUs, or train on CPUs (--cpu)"
            )
        beyond = [device for device in self.device_ids if device >= gpus]
        if beyond:
            raise ClusterError(
                f"{where}: device {beyond[0]} is not among the {gpus} visible GPU(s); "
                "devices count from 0"
            )


def _master_addr(placement: Placement) -> str:
    if placement.master_addr is not None:
        return placement.master_addr
    if placement.num_nodes == 1:
        return LOOPBACK
    raise ClusterError(
        f"{placement.method} started {placement.num_nodes} nodes but MASTER_ADDR is not set; "
        "set it to the host name of rank 0"
    )
