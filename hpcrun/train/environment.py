"""Environment of a rank: folder, import path, CPUs, threads and network; checks against the config.

torchrun sets OMP_NUM_THREADS=1 and srun sets nothing: without a limit, each rank starts as
many threads as the node has cores.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hpcrun.config import Config
from hpcrun.devices.affinity import bind_rank, cpus_of_rank
from hpcrun.devices.devices import require_given_gpus, visible_gpus
from hpcrun.errors import ClusterError, error_on_all_ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.interfaces import (
    AUTO,
    NoSharedInterface,
    interface_variables,
    own_interfaces,
    shared_interface,
)
from hpcrun.run.directory import RunDirectory, RunError, read_record
from hpcrun.run.events import Attempt
from hpcrun.run.import_path import copied_path, folders
from hpcrun.run.snapshot import recorded_snapshot


def enter_folder(run: RunDirectory) -> None:
    """Change to the folder of the submission, and put it on the import path.

    The task's module and relative paths are then found, no matter where and how this process was started.
    """
    folder = read_record(run).get("folder")
    if folder is None:
        return
    try:
        os.chdir(folder)
    except OSError as error:
        raise RunError(
            f"{folder}: the folder from which {run.name} was submitted cannot be entered: "
            f"{error.strerror}; restore it, or correct `folder` in {run.record}, without its line sha256"
        ) from error
    snapshot = recorded_snapshot(run)
    copied = snapshot.copy_of(Path(folder)) if snapshot else None
    sys.path.insert(0, str(copied or folder))
    if snapshot is not None:
        # PYTHONPATH or an editable install may also lead to the working tree instead of the snapshot.
        sys.path[:] = copied_path(sys.path, folders(), snapshot.copy_of)


def describe(config: Config) -> DistributedConfig:
    """Return this process's rank and world size, with the config's options for DDP; raises ClusterError."""
    found = DistributedConfig.from_env(cpu=config.job.cpu)
    train = config.train
    return found.model_copy(
        update={
            "find_unused_parameters": train.find_unused_parameters,
            "broadcast_buffers": train.broadcast_buffers,
            "gradient_as_bucket_view": train.gradient_as_bucket_view,
        }
    )


def require_fit(config: Config, distributed: DistributedConfig) -> None:
    """Check the config against the number of ranks that were started; raises UserError on all of them.

    The config was checked against its own ``job`` section, but a launcher may start other numbers.
    """
    ranks, train = distributed.world_size, config.train
    line = None
    if train.parallel in ("single", "dp") and ranks > 1:
        line = (
            f"train.parallel: {train.parallel}, but {ranks} ranks were started, which would each train "
            "a separate model; start one rank, or set train.parallel=ddp"
        )
    elif train.batch_size < ranks * (train.accumulation if train.micro_batch is None else 1):
        line = (
            f"train.batch_size: {train.batch_size} samples are too few for the {ranks} ranks that were "
            f"started x train.accumulation={train.accumulation}; start fewer ranks"
        )
    if line is not None:
        raise error_on_all_ranks(line, distributed.rank)


def resolve_interface(
    config: Config, run: RunDirectory, attempt: Attempt, distributed: DistributedConfig
) -> Config:
    """Return ``config`` with a network interface in place of ``job.interface: auto``."""
    if config.job.interface != AUTO:
        return config
    name = None
    if distributed.num_nodes > 1 and distributed.launch_method != "local":
        try:
            name = shared_interface(run, attempt, distributed, config.train.timeout)
        except NoSharedInterface as error:
            raise error_on_all_ranks(str(error), distributed.rank, certain=False) from error
        if distributed.rank == 0:
            print(
                f"hpcrun: job.interface=auto: all nodes reach each other on {name[1:]}", flush=True
            )
    return config.model_copy(update={"job": config.job.model_copy(update={"interface": name})})


def require_node(config: Config, distributed: DistributedConfig) -> None:
    """Check that this node has the GPUs and the network that the job needs, and select the network.

    Raises:
        NodeUnfit: the node lacks the GPUs or the network.
    """
    if not config.job.cpu:
        require_given_gpus(os.environ)
    if config.job.interface and distributed.num_nodes > 1 and distributed.launch_method != "local":
        own = own_interfaces()
        os.environ.update(interface_variables(config.job.interface, os.environ, own))


def prepare_environment(distributed: DistributedConfig, *, bind: bool, started: int = 1) -> None:
    """Set what libraries read only once, at import; call it before they start threads.

    Args:
        bind: bind this process to the CPUs of its rank.
        started: the number of ranks that the program of this task starts.
    """
    gpu = bool(distributed.device_ids)
    index, ranks = distributed.local_rank, distributed.num_gpus_per_node
    if distributed.launch_method == "local":
        # All nodes of the local cluster are this machine.
        index, ranks = distributed.rank, distributed.world_size
    cpus = cpus_of_rank(os.environ, ranks)
    if bind:
        cpus = bind_rank(os.environ, index, ranks, gpu=gpu)
    threads = threads_per_rank(os.environ, cpus, started)
    if not os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if distributed.launch_method == "local":
        # By default gloo binds to the address to which the host's name resolves.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def print_without_gpu(distributed: DistributedConfig) -> None:
    """Print on rank 0 that the training runs on CPUs, and the reason; nothing with GPUs."""
    if distributed.rank == 0 and not distributed.device_ids:
        seen = visible_gpus(os.environ)
        reason = "no GPU is visible" if not seen else "job.cpu is set"
        ranks = distributed.world_size
        where = "1 rank on the CPU" if ranks == 1 else f"{ranks} ranks on the CPU over gloo"
        print(
            f"hpcrun: {where} ({reason}), threads each: {os.environ['OMP_NUM_THREADS']}",
            flush=True,
        )


def threads_per_rank(environ: Mapping[str, str], cpus: int, ranks: int = 1) -> int:
    """Return the threads of each of ``ranks`` ranks in a task that has ``cpus`` CPUs to itself.

    OMP_NUM_THREADS decides if it is set (its first number: OpenMP allows one per nesting
    level), then SLURM_CPUS_PER_TASK, then ``cpus``.

    Raises:
        ClusterError: the value of a variable is not a positive number.
    """
    asked = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if asked:
        return _positive("OMP_NUM_THREADS", asked)
    given = environ.get("SLURM_CPUS_PER_TASK", "").strip()
    if given:
        cpus = _positive("SLURM_CPUS_PER_TASK", given)
    return max(1, cpus // ranks)


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ClusterError(f"{name} is {text!r}: expected a positive number; correct or unset it")
    return int(text)
