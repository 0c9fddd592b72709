"""The arguments of a trainer: its precision, its optimizer and its schedule."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpcrun.config import AMPConfig

MakeOptimizer = Callable[[nn.Module], Optimizer]

_LEARNING_RATE = 1e-3
"""Default learning rate of ``torch.optim.AdamW``."""


def optimizer_and_precision(
    optimizer: Any, config: AMPConfig | None, amp: AMPConfig | None, learning_rate: float | None
) -> tuple[Optimizer | MakeOptimizer, AMPConfig]:
    """Return the optimizer, or the function that makes it, and the precision.

    Args:
        optimizer: an optimizer, a function that makes it, None for AdamW, or an AMPConfig.
        config: the precision, under the name of its class.
        amp: the precision.
        learning_rate: of AdamW; None: 1e-3.

    Raises:
        ValueError: two precisions, a learning rate for an optimizer that has one, a rate below 0, or another
            type.
    """
    if isinstance(optimizer, AMPConfig):
        config, optimizer = _only_one(optimizer, config), None
    chosen = _only_one(config, amp) or AMPConfig()
    if not isinstance(chosen, AMPConfig):
        raise ValueError(
            f"the precision is an AMPConfig, such as AMPConfig(dtype='bf16'), not a {type(chosen).__name__}"
        )
    rate = learning_rate
    if rate is not None and not (isinstance(rate, int | float) and 0 <= rate < math.inf):
        raise ValueError(f"learning_rate={rate!r} is not a number from 0 on")
    if optimizer is None:
        return adamw(_LEARNING_RATE if learning_rate is None else learning_rate), chosen
    if learning_rate is not None:
        raise ValueError(
            "learning_rate is for the AdamW of a trainer without an optimizer; set lr in your optimizer"
        )
    if isinstance(optimizer, type) and optimizer.__module__.startswith("torch.optim."):
        raise ValueError(
            f"give an optimizer, or a function that makes it: lambda model: {optimizer.__name__}("
            "model.parameters(), lr=1e-3), instead of a class"
        )
    if not isinstance(optimizer, Optimizer) and not callable(optimizer):
        raise ValueError(
            "the second argument is an AMPConfig, an optimizer, or a function that makes one from the "
            f"model, not a {type(optimizer).__name__}"
        )
    return optimizer, chosen


def _only_one(first: AMPConfig | None, second: AMPConfig | None) -> AMPConfig | None:
    if first is not None and second is not None:
        raise ValueError("the precision was given twice; give one of config and amp")
    return second if first is None else first


def adamw(learning_rate: float) -> MakeOptimizer:
    """Return a function that makes an AdamW of a model's trained parameters."""

    def make(model: nn.Module) -> Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=learning_rate)

    return make


def require_makers(optimizer: Any, scheduler: Any, *, replaced: bool) -> None:
    """Check the arguments that make the optimizer and the schedule.

    Raises:
        ValueError: an object was given where only a function helps, or ``step()`` needs an argument.
    """
    if isinstance(optimizer, Optimizer):
        if replaced:
            raise ValueError(
                "FSDP replaces the parameters that this optimizer has; give a function that makes it"
            )
        require_plain_step(optimizer)
    if isinstance(scheduler, LRScheduler):
        raise ValueError("give a function that makes the schedule from the optimizer")


def require_plain_step(stepped: Optimizer | LRScheduler) -> None:
    """Raise ValueError if ``step()`` has a required argument, such as a closure or a metric."""
    needed = [
        parameter.name
        for parameter in list(inspect.signature(type(stepped).step).parameters.values())[1:]
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if not needed:
        return
    instead = (
        "make it in your training loop from trainer.optimizer, and step it there"
        if isinstance(stepped, LRScheduler)
        else "use an optimizer whose step() needs no argument, such as SGD or Adam"
    )
    raise ValueError(
        f"training_step cannot supply the argument of {type(stepped).__name__}.step({', '.join(needed)}); "
        f"{instead}"
    )
