"""The environment of a rank: its config, place, folder, import path, threads, CPUs, GPUs and network."""

import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from hpcrun.config import Config
from hpcrun.devices.affinity import bind_rank, cpus_of_rank
from hpcrun.devices.devices import require_given_gpus, visible_gpus
from hpcrun.errors import ClusterError, error_on_all_ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.interfaces import interface_variables, own_interfaces
from hpcrun.run.directory import RunDirectory, RunError, read_record
from hpcrun.run.journal.journal import job_of_process
from hpcrun.run.snapshot import copied_path, import_folders, recorded_snapshot
from hpcrun.run.trust import require_own_code
from hpcrun.slurm.own_config import load_own


def own_config(run: RunDirectory) -> Config:
    """Return the config of a run of this user; raises UserError."""
    try:
        return load_own(run)
    except OSError as error:
        raise RunError(f"{run.config}: cannot be read: {error.strerror}; check the disk") from error


def describe(config: Config) -> DistributedConfig:
    """Return this process's rank and world size, with the config's options for DDP; raises ClusterError."""
    found = DistributedConfig.from_env(cpu=config.job.cpu)
    train = config.train
    return found.model_copy(
        update={
            "find_unused_parameters": train.find_unused_parameters,
            "broadcast_buffers": train.broadcast_buffers,
            "gradient_as_bucket_view": train.gradient_as_bucket_view,
            "bucket_mb": train.bucket_mb,
        }
    )


def job_by_hand(run: RunDirectory, config: Config, distributed: DistributedConfig) -> str:
    """Return a name in place of a job id: that of the process that started the ranks of rank 0's host.

    Raises:
        ClusterError: another host cannot be reached, or this rank has started twice.
    """
    if distributed.num_nodes > 1:
        # Must come before torch; the later call then changes nothing.
        prepare_environment(distributed, bind=config.train.affinity and not config.command)
        from hpcrun.train.parallel.hosts import agree_on_job

        starter = partial(job_of_process, run, os.getppid())
        return agree_on_job(distributed, starter, timeout=config.train.connect_timeout)
    # Several ranks cannot choose a free name: rank 0 may have taken the name already.
    return job_of_process(run, os.getpid()) if distributed.world_size == 1 else f"pid{os.getppid()}"


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
    if snapshot is not None:
        require_own_code(snapshot)
    copied = snapshot.copy_of(Path(folder)) if snapshot else None
    sys.path.insert(0, str(copied or folder))
    if snapshot is not None:
        # PYTHONPATH or an editable install may also lead to the working tree instead of the snapshot.
        sys.path[:] = copied_path(sys.path, import_folders(), snapshot)


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
    elif train.batch_size < ranks * (1 if _follows(config) else train.accumulation):
        line = (
            f"train.batch_size: {train.batch_size} samples are too few for the {ranks} ranks that were "
            f"started x train.accumulation={train.accumulation}; start fewer ranks"
        )
    if line is not None:
        raise error_on_all_ranks(line, distributed.rank)


def _follows(config: Config) -> bool:
    """Return True if the number of micro-batches follows from the number of ranks."""
    return config.train.micro_batch is not None or config.job.elastic


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


def prepare_forked(path: Path) -> str:
    """Prepare the environment of a forked rank as ``run_rank`` does later; return OMP_NUM_THREADS.

    Raises:
        UserError: the rank cannot train; a fresh process reports the reason.
    """
    config = own_config(RunDirectory(path.absolute()))
    if config.command:
        raise RunError(f"{path}: a command needs no fork")
    prepare_environment(describe(config), bind=config.train.affinity)
    return os.environ["OMP_NUM_THREADS"]


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
