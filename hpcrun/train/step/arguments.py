"""Checks of the arguments of the trainers."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def require_makers(optimizer: Any, scheduler: Any, *, replaced: bool) -> None:
    """Check the arguments that make the optimizer and the schedule.

    Args:
        replaced: True if wrapping the model replaces its parameters.

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


def require_micro_batches(micro_batches: Any) -> None:
    """Raise TypeError unless the micro-batches are a sequence, and ValueError if there are none."""
    # The types come first, because a check against Sequence takes longer.
    if not isinstance(micro_batches, (list, tuple)) and not isinstance(micro_batches, Sequence):
        raise TypeError(
            "training_step takes a list of micro-batches (for one batch: [batch]), not a "
            f"{type(micro_batches).__name__}"
        )
    if not micro_batches:
        raise ValueError("a training step needs at least one micro-batch")


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
