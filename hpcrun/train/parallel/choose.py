"""Which way of sharing the work a training takes: the one that is named, or what memory says."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from hpcrun.checkpoint.host_memory import total_memory
from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.config import AMPConfig, Config
from hpcrun.config.training import FSDP
from hpcrun.train.parallel import memory_estimate
from hpcrun.train.parallel.fsdp import FILLS_UNUSED, Sharded
from hpcrun.train.parallel.strategies import Replicated, Scattered, Strategy
from hpcrun.train.task_checks import unshardable

Parallel = Literal["single", "dp", "ddp", "fsdp"]

_MOMENTS = {"adamw": 2, "adam": 2, "sgd": 1}


def strategy(
    parallel: Parallel, distributed: DistributedConfig, amp: AMPConfig, fsdp: FSDP
) -> Strategy:
    """The strategy of that name. A single rank shares with nobody: for it ddp and fsdp are single.

    Raises:
        ValueError: single or dp, which are for one process, with several ranks.
    """
    if distributed.world_size == 1:
        return Scattered() if parallel == "dp" else Strategy()
    if parallel in ("single", "dp"):
        raise ValueError(
            f"parallel={parallel} is for one process; with several ranks take ddp or fsdp"
        )
    return Replicated(distributed) if parallel == "ddp" else Sharded(distributed, fsdp, amp.dtype)


def resolve_parallel(
    config: Config,
    model: nn.Module,
    distributed: DistributedConfig,
    group: Any,
    earlier: str | None = None,
) -> Parallel:
    """What ``train.parallel`` means here; ``auto`` prints how it came to its answer. Collective.

    Args:
        model: on the CPU still, before anything of it is on a device.
        group: a control group of all ranks, or None for a single one.
        earlier: what the run was last trained with, as rank 0 knows it.
    """
    if config.train.parallel == "fsdp" and distributed.world_size == 1:
        print(
            "hpcrun: train.parallel=fsdp: a single rank has nobody to share with; it trains as `single` "
            "does, and nothing in fsdp applies",
            flush=True,
        )
    if config.train.parallel != "auto":
        return config.train.parallel
    if distributed.world_size == 1:
        return "single"
    before: list[str | None] = [earlier]
    dist.broadcast_object_list(before, src=0, group=group)
    chosen, line = decide(
        config,
        need(config, model),
        _least(_device_memory(distributed), group),
        before[0],
        unfit=unshardable(model)[0],
    )
    if distributed.rank == 0:
        print(f"hpcrun: {line}", flush=True)
    return chosen


def decide(
    config: Config,
    wanted: memory_estimate.Need,
    room: int,
    earlier: str | None = None,
    unfit: str | None = None,
) -> tuple[Parallel, str]:
    """What ``auto`` takes for several ranks with ``room`` bytes each, and the line that says why.

    ``unfit``: what keeps the model from being sharded, if anything. A run that was sharded stays so where
    DDP would fit too: the two round differently.
    """
    fits, ours = memory_estimate.fits(wanted, room), only_ddp(config)
    chosen: Parallel = "ddp" if ours or unfit or (fits and earlier != "fsdp") else "fsdp"
    reason = ""
    if chosen == "ddp" and not fits:
        reason = f", which {ours} needs" if ours else f", since {unfit}"
    elif chosen == "fsdp" and fits:
        reason = ", as before"
    return (
        chosen,
        f"train.parallel=auto takes {chosen}{reason}: {memory_estimate.told(wanted, room)}",
    )


def only_ddp(config: Config) -> str | None:
    """The first key of ``config`` that asks for what DDP alone can do."""
    train = config.train
    if train.compression != "none":
        return "train.compression"
    if train.uneven == "join":
        return "train.uneven=join"
    if train.find_unused_parameters and not FILLS_UNUSED:
        return "train.find_unused_parameters"
    return "train.channels_last" if train.channels_last else None


def need(config: Config, model: nn.Module) -> memory_estimate.Need:
    """What training ``model`` with DDP keeps, by what ``config`` asks for."""
    return memory_estimate.need(
        ((p.numel(), p.element_size(), p.requires_grad) for p in model.parameters()),
        moments=_MOMENTS[config.optim.name],
        bucket_view=config.train.gradient_as_bucket_view,
        average=config.train.ema is not None,
        unsent=config.train.compression == "powersgd",
    )


def _device_memory(distributed: DistributedConfig) -> int:
    """Bytes of this rank's device: all of them, because what is free now may not be at the next start."""
    if distributed.device_ids:
        return torch.cuda.mem_get_info(distributed.device_ids[0])[1]
    return total_memory() // distributed.num_gpus_per_node


def _least(value: int, group: Any) -> int:
    """The smallest ``value`` of any rank. Collective."""
    least = torch.tensor([value])
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return int(least)
