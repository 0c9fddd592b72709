"""Find the parameters on which a loss does not depend: DDP would wait for their gradients forever."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpcrun.checkpoint.state.capture import apply_rank, capture_rank
from hpcrun.errors import NotTrainable, UserError
from hpcrun.train.step.amp_trainer import AMPTrainer
from hpcrun.train.step.gate import trained_by

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
    parameters that required one when it wrapped the model.
    """

    def __init__(self, trainer: AMPTrainer) -> None:
        copies = isinstance(trainer.model, DistributedDataParallel)
        held = set() if copies else {id(p) for p in trained_by(trainer.optimizer)}
        self._parameters = {
            name: parameter
            for name, parameter in trainer.module.named_parameters()
            if not parameter.requires_grad and id(parameter) not in held
        }
        self._unfrozen: set[str] = set()
        for prefix, part in trainer.module.named_modules():
            if issubclass(type(part), FSDPModule) and any(
                name in self._parameters for name, _ in part.named_parameters(prefix)
            ):
                # Before FSDP's own hook, which frees the gathered weights and their requires_grad.
                part.register_forward_hook(partial(self._note_unfrozen, prefix), prepend=True)

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def require(self, step: int) -> None:
        """Raise NotTrainable if a frozen parameter requires a gradient after ``step``."""
        unfrozen = [
            name
            for name, p in self._parameters.items()
            if p.requires_grad or name in self._unfrozen
        ]
        if unfrozen:
            names = shortened([name.replace(_CHECKPOINT_PREFIX, "") for name in unfrozen])
            raise NotTrainable(
                f"requires_grad became True in step {step} for {names}, but hpcrun fixes the set of trained "
                "parameters at the start. Build it with requires_grad=True, and let the model's forward set "
                "it to False until it is needed; under ddp also set train.find_unused_parameters=true"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_unfrozen(self, prefix: str, part: nn.Module, *_: Any) -> None:
        """Record the gathered parameters of ``part`` that became trainable."""
        for name, parameter in part.named_parameters(prefix):
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                self._unfrozen.add(name)


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
def kept_generators() -> Iterator[None]:
    """Restore the random generators after the block."""
    kept = capture_rank()
    yield
    apply_rank(kept)


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
