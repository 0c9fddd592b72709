"""The first step of the learning-rate decay. Earlier steps do not depend on ``train.steps``."""

import math

from hpcrun.config.schema import Config


def decay_begins(config: Config) -> float:
    """Return the first step of ``config`` whose learning rate depends on ``train.steps``, or infinity."""
    optim, steps = config.optim, config.train.steps
    if optim.schedule == "constant":
        return math.inf
    if optim.schedule != "wsd":
        return optim.warmup_steps
    return max(optim.warmup_steps, steps - (optim.decay_steps or max(1, steps // 10)))


def least_steps(config: Config, steps_done: int) -> int | None:
    """Return the smallest ``train.steps`` with a decay after ``steps_done`` steps; None if impossible."""
    optim = config.optim
    decay = (optim.decay_steps or 0) if optim.schedule == "wsd" else 0
    if optim.schedule == "constant" or steps_done < optim.warmup_steps:
        return max(steps_done + 1, optim.warmup_steps + decay)
    if optim.schedule != "wsd":
        return None
    if optim.decay_steps is not None:
        return steps_done + optim.decay_steps + 1
    # The default decay is a tenth of the steps, rounded down, and at least one step.
    return max(steps_done + 2, steps_done * 10 // 9 + 1)
