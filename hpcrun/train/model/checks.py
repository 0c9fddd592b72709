"""Check the model and the loss of a task, with one line for each problem; passes that change nothing.

DDP would wait forever for the gradient of a parameter on which the loss does not depend.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from hpcrun.errors import NotTrainable, UserError
from hpcrun.train.step.amp_trainer import AMPTrainer
from hpcrun.train.step.gate import trained_by
from hpcrun.train.task import Task


def require_model(model: Any, task: Task) -> None:
    """Raise UserError if the result of ``task.build_model()`` cannot be trained."""
    where = f"{type(task).__name__}.build_model()"
    if not isinstance(model, nn.Module):
        raise UserError(f"{where} returned {_kind(model)}; return a torch.nn.Module")
    unmade = [name for name, value in _values(model) if is_lazy(value)]
    if unmade:
        raise UserError(
            f"{where}: a lazy module has no shape before its first batch ({shortened(unmade)}); give the "
            "sizes, or call the model once in build_model with a batch of zeros"
        )
    if not any(p.requires_grad for p in model.parameters()):
        frozen = [name for name, _ in model.named_parameters()]
        reason = (
            f"requires_grad is False for {shortened(frozen)}" if frozen else "it has no parameters"
        )
        raise UserError(f"{where}: the model has nothing to train: {reason}")
    if sparse := sparse_weights(model):
        raise UserError(
            f"{where}: the gradients of {shortened(sparse)} are sparse, which most optimizers and "
            "several GPUs refuse; build the embedding with sparse=False"
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


# Node of torch.utils.checkpoint(use_reentrant=True); the graph behind it exists only in the backward pass.
_OPAQUE = "CheckpointFunctionBackward"


def reached(loss: Tensor) -> set[Any] | None:
    """Return the nodes of autograd's graph that lead to ``loss``; None if part of the graph is hidden."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == _OPAQUE:
            return None
        waiting += [following for following, _ in node.next_functions]
    return seen


def unreached(loss: Tensor, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Return the names of the trained parameters from which no path leads to ``loss``.

    The list is empty if part of the graph is hidden.
    """
    nodes = reached(loss)
    if nodes is None:
        return []
    used = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    return [name for name, p in parameters if p.requires_grad and id(p) not in used]


def require_all_used(loss: Tensor, module: nn.Module) -> None:
    """Raise UserError if trained parameters of ``module`` get no gradient from ``loss``."""
    names = unreached(loss, module.named_parameters())
    if names:
        raise UserError(
            f"train.find_unused_parameters: the loss does not depend on {shortened(names)}, and DDP would "
            "wait for their gradients; set it to true, or freeze or remove these parameters"
        )


def shortened(names: Sequence[str]) -> str:
    """Return the first three of ``names`` and the number of the rest."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


class Frozen:
    """Parameters that are frozen and that nothing would update if they became trainable; may be empty.

    Under DDP these are all frozen parameters, even those in the optimizer: DDP reduces only gradients of
    parameters that required one when it wrapped the model. Under FSDP the check does not see a forward pass
    that unfreezes a block's gathered weights.
    """

    def __init__(self, trainer: AMPTrainer) -> None:
        copies = isinstance(trainer.model, DistributedDataParallel)
        held = set() if copies else {id(p) for p in trained_by(trainer.optimizer)}
        self._parameters = {
            name: parameter
            for name, parameter in trainer.module.named_parameters()
            if not parameter.requires_grad and id(parameter) not in held
        }

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def require(self, step: int) -> None:
        """Raise NotTrainable if a frozen parameter requires a gradient after ``step``."""
        unfrozen = [name for name, p in self._parameters.items() if p.requires_grad]
        if unfrozen:
            names = shortened([name.replace(_CHECKPOINT_PREFIX, "") for name in unfrozen])
            raise NotTrainable(
                f"requires_grad became True in step {step} for {names}, but hpcrun fixes the set of trained "
                "parameters at the start. Build it with requires_grad=True, and let the model's forward set "
                "it to False until it is needed; under ddp also set train.find_unused_parameters=true"
            )


@contextlib.contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers after the block, including replaced ones."""
    kept = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    yield
    with torch.no_grad():
        for part, name, buffer, value in kept:
            buffer.copy_(value)
            setattr(part, name, buffer)


@contextlib.contextmanager
def kept_gradients(module: nn.Module) -> Iterator[None]:
    """Set the gradients to None for the block, and restore them afterwards."""
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    yield
    for parameter, gradient in kept:
        parameter.grad = gradient


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode for the block, and restore each submodule's mode afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
