"""Check the model and the loss of a task, with one line for each problem."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpcrun.config import Config
from hpcrun.errors import NotTrainable, UserError
from hpcrun.train.model.unused_parameters import shortened
from hpcrun.train.task import Task

_ONE_VALUE = "Expected more than 1 value per channel when training"
"""Torch's error text for a batch norm with a single sample."""


def require_model(model: Any, task: Task, config: Config, *, ranks: int, gpu: bool) -> None:
    """Raise UserError if the result of ``task.build_model()`` cannot be trained with ``config``.

    ``gpu``: True if each of the ``ranks`` has a GPU.
    """
    where = f"{type(task).__name__}.build_model()"
    if not isinstance(model, nn.Module):
        raise UserError(f"{where} returned {_kind(model)}; return a torch.nn.Module")
    unmade = [name for name, value in _values(model) if is_lazy(value)]
    if unmade:
        raise UserError(
            f"{where}: a lazy module has no shape before its first batch ({shortened(unmade)}); give the "
            "sizes, or call the model once in build_model with a batch of zeros"
        )
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        frozen = [name for name, _ in model.named_parameters()]
        reason = (
            f"requires_grad is False for {shortened(frozen)}" if frozen else "it has no parameters"
        )
        raise UserError(f"{where}: the model has nothing to train: {reason}")
    half = [name for name, p in trained if p.dtype == torch.float16]
    if half and config.amp.dtype == "fp16":
        raise UserError(
            f"amp.dtype: torch cannot unscale the gradients of float16 weights ({shortened(half)}); "
            f"let {where} return float32 weights, or set amp.dtype=fp32"
        )
    waits = [name for name, part in model.named_modules() if isinstance(part, nn.SyncBatchNorm)]
    if waits and ranks > 1 and not gpu:
        raise UserError(
            f"{where}: torch supports SyncBatchNorm on GPUs only ({shortened(waits)}); use BatchNorm on the "
            "CPU, or a single rank"
        )
    sparse = sparse_weights(model)
    if sparse and ranks > 1 and gpu:
        raise UserError(
            f"{where}: the gradients of {shortened(sparse)} are sparse, which several GPUs cannot sum; build "
            "the embedding with sparse=False, or use a single rank"
        )
    needed = _for_sparse(config, own=type(task).build_optimizer is not Task.build_optimizer)
    if sparse and needed:
        raise UserError(
            f"{needed[0].partition('=')[0]}: the gradients of {shortened(sparse)} are sparse, which needs "
            f"{' '.join(needed)}; set that, or build the embedding with sparse=False"
        )


def sparse_weights(model: nn.Module) -> list[str]:
    """Return the names of the trained parameters with sparse gradients."""
    return [
        f"{name}.weight" if name else "weight"
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        and part.sparse
        and part.weight.requires_grad
    ]


def unshardable(model: nn.Module) -> tuple[str | None, str]:
    """Return the reason why torch's ``fully_shard`` cannot shard ``model`` (None: it can), and a remedy."""
    sparse = sparse_weights(model)
    if sparse:
        return f"{sparse[0]} has sparse gradients", "build the embedding with sparse=False"
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            return f"{name} has no dimensions", "give it the shape (1,)"
        if parameter.is_complex():
            return f"{name} is complex", "store it as two real numbers (torch.view_as_complex)"
    return None, ""


def require_loss(value: Any, task: str) -> None:
    """Raise NotTrainable if ``value``, returned by the loss of the class ``task``, has no gradient."""
    require_number(value, task)
    if not value.requires_grad:
        raise NotTrainable(
            f"{task}.loss() returned a number that depends on no trained weight; return it with its graph, "
            "as computed from model(...): without detach(), item(), torch.no_grad() or a new tensor"
        )


def require_number(value: Any, task: str) -> None:
    """Raise NotTrainable if ``value``, returned by the loss of the class ``task``, is not a float scalar."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
        return
    raise NotTrainable(
        f"{task}.loss() returned {_kind(value)}; return one floating-point number, a tensor without "
        "dimensions: the mean over the batch's samples"
    )


def explain(error: ValueError, task: str, step: int, *, short_batch: bool) -> UserError | None:
    """Return a better error for ``error``, which a step raised; None if it is good enough.

    ``short_batch``: True if an epoch's short last batch is the cause, which ``train.uneven`` can change.
    """
    if not str(error).startswith(_ONE_VALUE):
        return None
    remedy = (
        "it is the end of an epoch: train.uneven=across or drop avoids short batches"
        if short_batch
        else "use a larger train.batch_size or train.micro_batch"
    )
    return NotTrainable(
        f"{task}: a batch norm of the model cannot compute the variance of one value, and a micro-batch of "
        f"step {step} has one sample: {remedy}; or use another norm"
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
    """Return the settings that sparse gradients need and the config lacks; ``own``: the task's optimizer."""
    optim = config.optim
    wanted = [
        ("optim.name=sgd", own or optim.name == "sgd"),
        ("optim.momentum=0", own or optim.momentum == 0),
        ("optim.weight_decay=0", own or optim.weight_decay == 0),
        ("train.clip_norm=null", config.train.clip_norm is None),
    ]
    return [setting for setting, is_set in wanted if not is_set]
