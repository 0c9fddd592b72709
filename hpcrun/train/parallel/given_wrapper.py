"""A model that the program has wrapped or sharded itself, given to a trainer of many ranks."""

import os
import warnings

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpcrun.errors import ClusterError
from hpcrun.slurm.placement import read_placement


def unwrapped(
    model: nn.Module, parallel: str, compresses: bool, ranks: int
) -> tuple[nn.Module, DistributedDataParallel | None]:
    """Return the model without DDP, and its DDP if the program has made one: a second DDP would be wrong.

    With two wrappers, the ranks' gradients are averaged in another order, and their weights differ.

    Args:
        model: the model of the program.
        parallel: the parallelism of the trainer.
        compresses: the trainer has a communication hook.
        ranks: number of ranks of the trainer.

    Raises:
        ValueError: the trainer would wrap the model in something else, the wrapper has other ranks, or the
            program has sharded the model.
    """
    sharded = isinstance(model, FullyShardedDataParallel) or any(
        isinstance(value, DTensor) for value in model.parameters()
    )
    if sharded:
        raise ValueError(
            "the model is sharded already; give the trainer the model before FSDP or wrap_model_fsdp, with "
            'parallel="fsdp"'
        )
    if not isinstance(model, DistributedDataParallel):
        return model, None
    inside: nn.Module = model.module
    found = dist.get_world_size(model.process_group)
    if found != ranks:
        raise ValueError(
            f"the model is in DistributedDataParallel over {found} rank(s), and the trainer has {ranks}; use "
            "DistributedAMPTrainer with the rank and world size of the process group"
        )
    if parallel != "ddp" or compresses:
        wanted = "comm_hook" if parallel == "ddp" else f'parallel="{parallel}"'
        raise ValueError(
            f"the model is in DistributedDataParallel already, and {wanted} needs a wrapper of the trainer; "
            "give the trainer the model without DistributedDataParallel"
        )
    return inside, model


def require_one_process(model: nn.Module) -> None:
    """Raise ValueError if the model is in DDP over several ranks: each would save into one folder."""
    if isinstance(model, DistributedDataParallel):
        found = dist.get_world_size(model.process_group)
        if found > 1:
            raise ValueError(
                f"the model is in DistributedDataParallel over {found} ranks, and AMPTrainer is for one "
                "process; use DistributedAMPTrainer"
            )


def warn_of_copies() -> None:
    """Warn on rank 0 if a launcher has started several ranks: each of them would train its own model."""
    try:
        placement = read_placement(os.environ)
    except ClusterError:  # a trainer of one process needs no rank
        return
    if placement.world_size > 1 and placement.rank == 0:
        warnings.warn(
            f"AMPTrainer trains in this process only; the job has {placement.world_size} ranks, so each "
            "rank trains a separate model; use DistributedAMPTrainer for one model on all ranks",
            stacklevel=4,
        )
