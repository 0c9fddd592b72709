"""The optimiser and its learning-rate schedule, from the config."""

import math
from collections.abc import Callable

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hpcrun.config import Config


def build_optimizer(model: nn.Module, config: Config) -> Optimizer:
    """The optimiser that ``config.optim`` names, at ``config.train.lr``.

    Weight decay is kept off vectors (biases, norms), as GPT-3's authors did (Brown et al. 2020, app. B).
    """
    wanted = config.optim
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": wanted.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if wanted.name == "sgd":
        return SGD(groups, lr=config.train.lr, momentum=wanted.momentum)
    kind = AdamW if wanted.name == "adamw" else Adam
    return kind(groups, lr=config.train.lr, betas=wanted.betas, eps=wanted.eps)


def build_schedule(optimizer: Optimizer, config: Config) -> LambdaLR:
    """The learning rate as a factor of ``config.train.lr`` at each optimiser step."""
    return LambdaLR(optimizer, learning_rate_factor(config))


def learning_rate_factor(config: Config) -> Callable[[int], float]:
    """The factor at a step: linear warm-up from 1/warmup_steps to 1, then the schedule down to
    ``final_lr_fraction`` at ``train.steps`` (cosine: Loshchilov, Hutter 2017, without restarts)."""
    warmup, steps = config.optim.warmup_steps, config.train.steps
    floor, schedule = config.optim.final_lr_fraction, config.optim.schedule

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        if schedule == "linear":
            return floor + (1 - floor) * (1 - progress)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor
