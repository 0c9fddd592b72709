"""Frozen parameters: refuse a parameter that becomes trainable after the start."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpcrun.errors import NotTrainable
from hpcrun.train.model.unused_parameters import shortened
from hpcrun.train.step.amp_trainer import AMPTrainer
from hpcrun.train.step.gate import trained_by


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
