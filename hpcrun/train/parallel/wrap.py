"""Wrap a model for DDP or FSDP in your own loop, without a trainer."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpcrun.config.training import FSDP
from hpcrun.devices import accelerator
from hpcrun.errors import UserError
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.model.checks import unshardable
from hpcrun.train.model.units import Policy, by_policy
from hpcrun.train.parallel.fsdp import units
from hpcrun.train.parallel.strategies import copy_from_rank_zero


def wrap_model_ddp(model: nn.Module, device: torch.device | str | int | None = None) -> nn.Module:
    """Return ``model`` in ``DistributedDataParallel``; on one process, return it unchanged. Collective.

    Call :func:`hpcrun.setup_distributed` first, and ``torch.compile`` afterwards. A model that is in
    ``DistributedDataParallel`` already is returned as it is.

    Args:
        model: the model; it moves to ``device``.
        device: the device of this rank, or the number of its GPU, such as the local rank; without a GPU a
            number means the CPU. None: where the model is.

    Raises:
        RuntimeError: the launcher started several ranks, and there is no process group.
        UserError: the model is sharded.
    """
    if not _several() or isinstance(model, DistributedDataParallel):
        return model
    if _sharded(model):
        raise UserError(
            "wrap_model_ddp(): the model is sharded already by FSDP; give it the plain model, or use one of "
            "wrap_model_ddp and wrap_model_fsdp"
        )
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(device, int):
        place = accelerator.device(device) if accelerator.count() else torch.device("cpu")
    elif device is not None:
        place = torch.device(device)
    on_gpu = accelerator.is_accelerator(place)
    return DistributedDataParallel(model.to(place), device_ids=[place] if on_gpu else None)


def wrap_model_fsdp(model: nn.Module, auto_wrap_policy: Policy | None = None) -> nn.Module:
    """Shard ``model`` in place over all ranks and return it; one process returns it unchanged. Collective.

    This is torch's FSDP2, ``fully_shard``. Call :func:`hpcrun.setup_distributed` first, and make the
    optimizer afterwards: the parameters are replaced. All ranks get the weights of rank 0.

    A file that rank 0 writes from ``state_dict()`` has the shards of rank 0 only, and the other ranks refuse
    to load it. Save with :class:`hpcrun.Checkpointer` or :func:`hpcrun.resumable`. A model that is sharded
    already is returned as it is.

    Args:
        model: the model, on the CPU or the device of this rank.
        auto_wrap_policy: the submodules that are gathered separately: a number of parameters from which a
            submodule is one, a function of a module that returns True for one, or a policy of
            ``torch.distributed.fsdp.wrap`` such as
            ``functools.partial(size_based_auto_wrap_policy, min_num_params=10**8)``. None: the blocks of the
            model's lists and large layers, as ``fsdp.wrap=auto``. Submodules with tied weights belong to the
            root.

    Raises:
        RuntimeError: the launcher started several ranks, and there is no process group.
        TypeError: the policy is neither a number nor a function.
        ValueError: the number is below 1.
        UserError: torch cannot shard the model, or it is in another wrapper, or a part of it is sharded
            already; the text has the reason and the remedy.
    """
    if not _several() or isinstance(model, FSDPModule):
        return model
    if _sharded(model) or isinstance(model, DistributedDataParallel):
        found = (
            "a part of the model is sharded already" if _sharded(model) else "the model is in DDP"
        )
        raise UserError(f"wrap_model_fsdp(): {found}; give it the plain model")
    unfit, remedy = unshardable(model)
    if unfit is not None:
        raise UserError(f"wrap_model_fsdp(): FSDP cannot shard the model: {unfit}; {remedy}")
    parts = (
        units(model, FSDP())[0] if auto_wrap_policy is None else by_policy(model, auto_wrap_policy)
    )
    device = accelerator.default_device()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in [*parts, model]:
        for value in [*part.parameters(), *part.buffers()]:
            if not isinstance(value, DTensor) and not value.is_meta:
                value.data = value.data.to(device)
                copy_from_rank_zero(value.data)
        fully_shard(part, mesh=mesh)
    model.register_load_state_dict_pre_hook(_refuse_other_shards)  # type: ignore[no-untyped-call]
    return model


def _refuse_other_shards(module: nn.Module, state: Mapping[str, Any], *_: Any) -> None:
    """Raise UserError if ``state`` has shards of another rank, which torch would load in silence."""
    own = {
        name: value.device_mesh.get_coordinate()
        for name, value in module.named_parameters()
        if isinstance(value, DTensor)
    }
    for name, place in own.items():
        given = state.get(name)
        if isinstance(given, DTensor) and given.device_mesh.get_coordinate() != place:
            raise UserError(
                f"load_state_dict(): {name} is the shard of another rank: state_dict() of a sharded model "
                "has the shards of one rank, so a file of rank 0 is no checkpoint; save and load on all "
                "ranks with hpcrun.Checkpointer, hpcrun.resumable or torch.distributed.checkpoint"
            )


def _sharded(model: nn.Module) -> bool:
    return any(isinstance(value, DTensor) for value in model.parameters())


def _several() -> bool:
    """Return True if there are several ranks; raises RuntimeError if they have no process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    started = DistributedConfig.from_env().world_size
    if started > 1:
        raise RuntimeError(
            f"the launcher started {started} ranks, and each would train a separate model: call "
            "hpcrun.setup_distributed() before wrapping the model"
        )
    return False
