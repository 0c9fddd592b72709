"""What is frozen when a training starts is not trained in it, and whoever thaws it is told so."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpcrun.train.errors import NotTrainable
from hpcrun.train.model.unused_parameters import shortened
from hpcrun.train.step.amp_trainer import AMPTrainer, trained_by


class Frozen:
    """The parameters that nothing would update if they began to require a gradient; false if there are none.

    DDP reduces the gradients of those that required one when it wrapped the model, whatever the
    optimiser holds.
    """

    def __init__(self, trainer: AMPTrainer) -> None:
        copies = isinstance(trainer.model, DistributedDataParallel)
        held = set() if copies else {id(p) for p in trained_by(trainer.optimizer)}
        self._parameters = {
            name: parameter
            for name, parameter in trainer.module.named_parameters()
            if not parameter.requires_grad and id(parameter) not in held
        }
        self._thawed: set[str] = set()
        for prefix, part in trainer.module.named_modules():
            if issubclass(type(part), FSDPModule) and any(
                name in self._parameters for name, _ in part.named_parameters(prefix)
            ):
                # Before torch's own, which takes the gathered weights away and with them what was set.
                part.register_forward_hook(partial(self._look, prefix), prepend=True)

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def require(self, step: int) -> None:
        """Raise UserError if one of them requires a gradient after ``step``."""
        thawed = [
            name for name, p in self._parameters.items() if p.requires_grad or name in self._thawed
        ]
        if thawed:
            names = shortened([name.replace(_CHECKPOINT_PREFIX, "") for name in thawed])
            raise NotTrainable(
                f"requires_grad became True in step {step} for {names}, and what is trained is settled at "
                "the start. Build it with requires_grad=True, and let the model's forward set that to False "
                "until its time; under ddp that takes train.find_unused_parameters=true"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _look(self, prefix: str, part: nn.Module, *_: Any) -> None:
        """Note what a pass through ``part`` has thawed of its gathered parameters."""
        for name, parameter in part.named_parameters(prefix):
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                self._thawed.add(name)
