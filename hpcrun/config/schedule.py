"""Where the learning rate begins to come down: up to there it does not tell how long a training will be."""

import math

from hpcrun.config.schema import Config


def decay_begins(config: Config) -> float:
    """The first step whose learning rate depends on ``train.steps``; infinite if none does."""
    optim, steps = config.optim, config.train.steps
    if optim.schedule == "constant":
        return math.inf
    if optim.schedule != "wsd":
        return optim.warmup_steps
    return max(optim.warmup_steps, steps - (optim.decay_steps or max(1, steps // 10)))


def least_steps(config: Config, stands: int) -> int | None:
    """The fewest ``train.steps`` with which none of ``stands`` steps lies in the decay; None: no number."""
    optim = config.optim
    decay = (optim.decay_steps or 0) if optim.schedule == "wsd" else 0
    if optim.schedule == "constant" or stands < optim.warmup_steps:
        return max(stands + 1, optim.warmup_steps + decay)
    if optim.schedule != "wsd":
        return None
    if optim.decay_steps is not None:
        return stands + optim.decay_steps + 1
    # A tenth, rounded down, and one step at the least.
    return max(stands + 2, stands * 10 // 9 + 1)
