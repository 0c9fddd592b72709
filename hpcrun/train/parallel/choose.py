"""Choose the parallelism of a training: as configured, or by memory for ``train.parallel=auto``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from hpcrun.config import AMPConfig, Config
from hpcrun.config.training import FSDP
from hpcrun.devices import accelerator
from hpcrun.devices.host_memory import total_memory
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.storage.errors import amount
from hpcrun.train.data.batching import accumulation_of
from hpcrun.train.model.checks import unshardable
from hpcrun.train.model.prepare import blocks
from hpcrun.train.parallel.comm_hooks import Compression
from hpcrun.train.parallel.fsdp import FSDPStrategy
from hpcrun.train.parallel.network import BYTES, Group, fsdp_step, machine_named
from hpcrun.train.parallel.strategies import DataParallelStrategy, DDPStrategy, Strategy

Parallel = Literal["single", "dp", "ddp", "fsdp"]

HEADROOM = 0.4
"""The fraction of a device's memory reserved for activations, workspaces and fragmentation."""

KEPT = 0.1
"""The fraction of a device's memory that gathered weights may take between the passes: a quarter of
`HEADROOM`, so that most of it remains for activations."""

_MOMENTS = {"adamw": 2, "adam": 2, "sgd": 1}


@dataclass(frozen=True)
class Need:
    """Bytes that DDP keeps on every rank from step to step. ``average``: of the weights (``train.ema``)."""

    weights: int
    gradients: int
    optimizer: int
    average: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts in bytes."""
        return self.weights + self.gradients + self.optimizer + self.average


def strategy(
    parallel: Parallel,
    distributed: DistributedConfig,
    amp: AMPConfig,
    fsdp: FSDP,
    compression: Compression | None = None,
    devices: Sequence[int] | None = None,
) -> Strategy:
    """Make the strategy ``parallel``. On a single rank ddp and fsdp are the same as single.

    Args:
        devices: the GPUs of dp; None: all that the process sees.

    Raises:
        ValueError: another value; single or dp, which need one process, with several ranks; a
            ``compression`` without ddp.
    """
    values = get_args(Parallel)
    if parallel not in values:
        written = str(parallel).lower()
        meant = f'write "{written}"' if written in values else "use one of these values"
        raise ValueError(f"parallel={parallel!r} is not one of {', '.join(values)}; {meant}")
    compression = compression or Compression()
    if distributed.world_size > 1 or parallel in ("fsdp", "dp"):
        compression.require_ddp(parallel)
    if distributed.world_size == 1:
        return DataParallelStrategy(devices) if parallel == "dp" else Strategy()
    if parallel in ("single", "dp"):
        raise ValueError(
            f"parallel={parallel} works in one process only; with several ranks use ddp or fsdp"
        )
    if parallel == "ddp":
        return DDPStrategy(distributed, compression)
    return FSDPStrategy(distributed, fsdp, amp.dtype)


def resolve_parallel(
    config: Config,
    model: nn.Module,
    distributed: DistributedConfig,
    ranks: Ranks,
    earlier: str | None = None,
) -> Parallel:
    """Resolve ``train.parallel``; for ``auto`` print the reason for the choice. Collective."""
    if config.train.parallel != "auto":
        return config.train.parallel
    if distributed.world_size == 1:
        return "single"
    before = ranks.from_rank_0(lambda: earlier)
    chosen, line = decide(
        config,
        need(config, model),
        least_of_ranks(_device_memory(distributed), ranks.group),
        before,
        unfit=unshardable(model)[0],
    )
    if distributed.rank == 0:
        print(f"hpcrun: {line}", flush=True)
    return chosen


def decide(
    config: Config,
    wanted: Need,
    room: int,
    earlier: str | None = None,
    unfit: str | None = None,
) -> tuple[Parallel, str]:
    """Choose for ``auto`` between DDP and FSDP with ``room`` bytes per rank; return the choice and a line.

    ``unfit``: the reason why the model cannot be sharded, if there is one. A run that was sharded stays
    sharded even if DDP fits, because the two round differently.
    """
    fits, ours = wanted.total <= room * (1 - HEADROOM), only_ddp(config)
    chosen: Parallel = "ddp" if ours or unfit or (fits and earlier != "fsdp") else "fsdp"
    reason = ""
    if chosen == "ddp" and not fits:
        reason = f", which {ours} needs" if ours else f", because {unfit}"
    elif chosen == "fsdp" and fits:
        reason = ", as in the last attempt"
    average = f" + {amount(wanted.average)} of averaged weights" if wanted.average else ""
    return chosen, (
        f"train.parallel=auto chooses {chosen}{reason}: {amount(wanted.weights)} of weights + "
        f"{amount(wanted.gradients)} of gradients + {amount(wanted.optimizer)} of optimizer state{average} = "
        f"{amount(wanted.total)} per rank, of {amount(room)}; {HEADROOM:.0%} are reserved for activations"
    )


def resolve_fsdp(
    config: Config,
    model: nn.Module,
    distributed: DistributedConfig,
    ranks: Ranks,
    parallel: Parallel,
    earlier: str | None = None,
) -> Config:
    """Return ``config`` with the choices of ``auto`` in ``fsdp``, if FSDP shards ``model``. Collective.

    ``earlier``: on rank 0 the shards that a checkpoint of as many ranks records. A change would round
    differently.
    """
    world, nodes = distributed.world_size, distributed.num_nodes
    if parallel != "fsdp" or world == 1:
        return config
    room = least_of_ranks(_device_memory(distributed), ranks.group)
    on_node = least_of_ranks(distributed.num_gpus_per_node, ranks.group)
    reshards, line = decide_reshard(config, model, room if distributed.device_ids else 0)
    config = with_fsdp(config, reshard_after_forward=reshards)
    if line and distributed.rank == 0:
        print(f"hpcrun: {line}", flush=True)
    if config.fsdp.shard != "auto":
        return config

    def choose() -> tuple[str, str]:
        if on_node * nodes != world or 1 in (on_node, nodes):
            return "full", ""
        if earlier in ("full", "hybrid"):
            return earlier, f"fsdp.shard=auto chooses {earlier}, as in the last checkpoint"
        if not distributed.device_ids:
            return "full", ""
        device = accelerator.name(accelerator.device(distributed.device_ids[0]))
        group = Group(world, on_node, machine_named(device))
        return decide_shard(config, model, group, room)

    chosen, line = ranks.from_rank_0(choose)
    if line and distributed.rank == 0:
        print(f"hpcrun: {line}", flush=True)
    return with_fsdp(config, shard=chosen)


def decide_reshard(config: Config, model: nn.Module, room: int) -> tuple[bool, str]:
    """Choose for ``fsdp.reshard_after_forward=auto`` with ``room`` bytes per rank; return choice and line.

    No line without a choice: if the key is set, ``room`` is 0 (the CPU), or shards stay on the CPU.
    """
    options = config.fsdp
    if options.reshard_after_forward != "auto" or options.cpu_offload or not room:
        return options.reshard_after_forward is not False, ""
    dtype = options.param_dtype or config.amp.dtype
    gathered = BYTES[dtype] * sum(p.numel() for p in model.parameters())
    reshards = gathered > KEPT * room
    return reshards, (
        f"fsdp.reshard_after_forward=auto chooses {str(reshards).lower()}: all weights in {dtype} take "
        f"{amount(gathered)}, and {KEPT:.0%} of the device's memory are {amount(int(KEPT * room))}"
    )


def decide_shard(config: Config, model: nn.Module, group: Group, room: int) -> tuple[str, str]:
    """Choose for ``fsdp.shard=auto`` with ``room`` bytes per rank; return the choice and a line.

    ``hybrid``, if a node has the memory for the model, and NCCL's cost model predicts less time with it.
    """
    kept = need(config, model).total // group.on_node
    if kept > room * (1 - HEADROOM):
        return "full", (
            f"fsdp.shard=auto chooses full: hybrid keeps {amount(kept)} per rank, of {amount(room)}; "
            f"{HEADROOM:.0%} are reserved for activations"
        )
    size, layers = sum(p.numel() for p in model.parameters()), max(1, len(blocks(model)))
    micro_batches = accumulation_of(config, group.ranks)
    full, hybrid = (
        fsdp_step(config, size, layers, group, micro_batches, hybrid=way) for way in (False, True)
    )
    chosen = "hybrid" if hybrid < full else "full"
    return chosen, (
        f"fsdp.shard=auto chooses {chosen}: NCCL's cost model predicts {full:.2g} s of communication per "
        f"step with full, {hybrid:.2g} s with hybrid"
    )


def with_fsdp(config: Config, **values: Any) -> Config:
    """Return ``config`` with other ``values`` in its section ``fsdp``."""
    return config.model_copy(update={"fsdp": config.fsdp.model_copy(update=values)})


def only_ddp(config: Config) -> str | None:
    """Return the key of ``config`` that only DDP supports, or None."""
    if config.train.find_unused_parameters:
        return "train.find_unused_parameters"
    return "train.comm_hook" if config.train.comm_hook != "none" else None


def need(config: Config, model: nn.Module) -> Need:
    """Estimate the memory that training ``model`` with DDP under ``config`` keeps."""
    weights = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return Need(
        weights,
        gradients=trained * (1 if config.train.gradient_as_bucket_view else 2),
        optimizer=trained * _MOMENTS[config.optim.name],
        average=trained if config.train.ema is not None else 0,
    )


def _device_memory(distributed: DistributedConfig) -> int:
    """Return the bytes of this rank's device in total; free memory may differ at the next start."""
    if distributed.device_ids:
        return accelerator.memory(accelerator.device(distributed.device_ids[0]))[1]
    return total_memory() // distributed.num_gpus_per_node


def least_of_ranks(value: int, group: Any) -> int:
    """Return the smallest ``value`` of all ranks. Collective."""
    least = torch.tensor([value])
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return int(least)
