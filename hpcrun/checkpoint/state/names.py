"""What the parts of a model are called in a checkpoint, whatever it is wrapped in."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# Names that only torch gives. DDP's own, `module`, is also a favourite of people.
_TORCH_ONLY = ("_orig_mod", "_checkpoint_wrapped_module")


def bare(model: nn.Module) -> nn.Module:
    """The model without what is wrapped around all of it: DDP, DataParallel, ``torch.compile``."""
    # torch's state-dict helpers know nothing of DataParallel, and mistake one tensor for another where
    # the model in DDP has a part `module`, and beside it one that is called as a part of that is.
    while True:
        if isinstance(model, DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def replicated(model: nn.Module) -> bool:
    """Whether DDP is around all of it, which keeps the ranks' parameters alike."""
    while isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
        model = inner
    return isinstance(model, DistributedDataParallel)


def named_parameters(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters with their canonical names, tied ones once unless told otherwise."""
    model = bare(model)
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield _canonical(model, name), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers with their canonical names."""
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
