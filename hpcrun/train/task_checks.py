"""What a model and its loss have to be for the loop to train them; whatever else gets its one line."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.train.errors import NotTrainable
from hpcrun.train.model.unused_parameters import shortened
from hpcrun.train.task import Task

_ONE_VALUE = "Expected more than 1 value per channel when training"
"""Torch's words of a batch norm that is given a single sample."""


def require_model(model: Any, task: Task, config: Config, *, ranks: int, cuda: bool) -> None:
    """Raise UserError if what ``task.build_model()`` gave cannot be trained as ``config`` says.

    ``cuda``: whether each of the ``ranks`` has a GPU.
    """
    where = f"{type(task).__name__}.build_model()"
    if not isinstance(model, nn.Module):
        raise UserError(f"{where} gave {_kind(model)}; let it return a torch.nn.Module")
    unmade = [name for name, value in _values(model) if is_lazy(value)]
    if unmade:
        raise UserError(
            f"{where}: a lazy module has no shape before its first batch ({shortened(unmade)}); name the "
            "sizes, or call the model once in there with a batch of zeros"
        )
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        frozen = [name for name, _ in model.named_parameters()]
        why = (
            f"requires_grad is False for {shortened(frozen)}" if frozen else "it has no parameters"
        )
        raise UserError(f"{where}: nothing of the model is trained: {why}")
    half = [name for name, p in trained if p.dtype == torch.float16]
    if half and config.amp.dtype == "fp16":
        raise UserError(
            f"amp.dtype: fp16 scales the gradients of weights in fp32, and those in fp16 ({shortened(half)}) "
            f"torch does not scale back; let {where} give float32, or set amp.dtype=fp32"
        )
    waits = [name for name, part in model.named_modules() if isinstance(part, nn.SyncBatchNorm)]
    if waits and ranks > 1 and not cuda:
        raise UserError(
            f"{where}: torch synchronises a SyncBatchNorm over GPUs alone ({shortened(waits)}); take "
            "BatchNorm on the CPU, or a single rank"
        )
    sparse = sparse_weights(model)
    if sparse and ranks > 1 and cuda:
        raise UserError(
            f"{where}: the gradients of {shortened(sparse)} are sparse, which several GPUs cannot sum; build "
            "the embedding with sparse=False, or take a single rank"
        )
    needed = _for_sparse(config, own=type(task).build_optimizer is not Task.build_optimizer)
    if sparse and needed:
        raise UserError(
            f"{needed[0].partition('=')[0]}: the gradients of {shortened(sparse)} are sparse, which torch "
            f"takes with {' '.join(needed)}; set that, or build the embedding with sparse=False"
        )


def sparse_weights(model: nn.Module) -> list[str]:
    """The names of the trained parameters whose gradients are sparse."""
    return [
        f"{name}.weight" if name else "weight"
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        and part.sparse
        and part.weight.requires_grad
    ]


def unshardable(model: nn.Module) -> tuple[str | None, str]:
    """What keeps torch's ``fully_shard`` from ``model`` (None: nothing), and what to do about it."""
    sparse = sparse_weights(model)
    if sparse:
        return f"{sparse[0]} has sparse gradients", "build the embedding with sparse=False"
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            return f"{name} has no dimensions", "give it the shape (1,)"
        if parameter.is_complex():
            return f"{name} is complex", "make it of two real numbers (torch.view_as_complex)"
    return None, ""


def require_loss(value: Any, task: str) -> None:
    """Raise NotTrainable if ``value``, which the loss of the class ``task`` gave, has no gradient."""
    require_number(value, task)
    if not value.requires_grad:
        raise NotTrainable(
            f"{task}.loss() gave a number that depends on no trained weight; return it with its graph, as "
            "computed from model(...): no detach(), item(), torch.no_grad() or tensor made anew"
        )


def require_number(value: Any, task: str) -> None:
    """Raise NotTrainable if ``value``, which the loss of the class ``task`` gave, is no scalar of floats."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
        return
    raise NotTrainable(
        f"{task}.loss() gave {_kind(value)}; let it return one floating-point number, a tensor without "
        "dimensions: the mean over the batch's samples"
    )


def told_better(error: ValueError, task: str, step: int, *, across: bool) -> UserError | None:
    """What to say instead of ``error``, which a step raised; None: it says enough.

    ``across``: whether a last batch that is short is the reason, which ``train.uneven`` can change.
    """
    if not str(error).startswith(_ONE_VALUE):
        return None
    remedy = (
        "the end of an epoch, where train.uneven=across or drop leaves no batch short"
        if across
        else "a larger train.batch_size or train.micro_batch gives it more"
    )
    return NotTrainable(
        f"{task}: a batch norm of the model knows no variance of one value, and a micro-batch of step {step} "
        f"has one sample: {remedy}; or take another norm"
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        shape = f"of shape {tuple(value.shape)}" if value.dim() else "without dimensions"
        return f"a tensor {shape} in {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _for_sparse(config: Config, *, own: bool) -> list[str]:
    """What has to be set for sparse gradients, and is not; ``own``: the task makes the optimiser."""
    optim = config.optim
    wanted = [
        ("optim.name=sgd", own or optim.name == "sgd"),
        ("optim.momentum=0", own or optim.momentum == 0),
        ("optim.weight_decay=0", own or optim.weight_decay == 0),
        ("train.clip_norm=null", config.train.clip_norm is None),
        # Whoever waits in Join gets the others' gradients by a broadcast, which gloo has for dense ones.
        ("train.uneven=pad", config.train.uneven != "join"),
    ]
    return [setting for setting, is_set in wanted if not is_set]
