"""Canonical names of a model's parameters and buffers, independent of wrappers."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# Names that only torch uses. DDP's name `module` is also common in user code.
_TORCH_ONLY = ("_orig_mod", "_checkpoint_wrapped_module")


def bare(model: nn.Module) -> nn.Module:
    """Return the model without its outer wrappers: DDP, DataParallel, ``torch.compile``."""
    # torch's state-dict helpers do not know DataParallel. They also confuse tensors if the model in DDP
    # has a submodule `module` and a sibling with the name of one of its submodules.
    while True:
        if isinstance(model, DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def replicated(model: nn.Module) -> bool:
    """Return True if DDP wraps the whole model, which keeps the parameters the same on all ranks."""
    while isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
        model = inner
    return isinstance(model, DistributedDataParallel)


def named_parameters(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters as ``torch.nn.Module.named_parameters``, without the names that wrappers add.

    Checkpoints use these names: they have no ``module.`` of DDP, ``_orig_mod.`` of ``torch.compile`` and
    ``_checkpoint_wrapped_module.`` of activation checkpointing.

    Args:
        model: a module, with or without wrappers.
        remove_duplicate: yield tied parameters only once.
    """
    model = bare(model)
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield _canonical(model, name), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers with their canonical names."""
    model = bare(model)
    for name, buffer in model.named_buffers():
        yield _canonical(model, name), buffer


def _canonical(model: nn.Module, name: str) -> str:
    kept, holder = [], model
    for part in name.split("."):
        of_ddp = part == "module" and isinstance(holder, DistributedDataParallel)
        if part not in _TORCH_ONLY and not of_ddp:
            kept.append(part)
        holder = getattr(holder, part)
    return ".".join(kept)
