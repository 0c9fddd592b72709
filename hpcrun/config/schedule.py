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
