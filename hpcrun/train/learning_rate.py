"""Scaling of the learning rate with the batch."""

import math
from collections.abc import Iterator
from typing import Literal

from torch.optim import Optimizer

from hpcrun.config import Config

Rule = Literal["none", "linear", "sqrt"]


def scaled_lr(lr: float, world_size: int, rule: Rule = "linear") -> float:
    """Return the learning rate for ``world_size`` ranks that each train on the batch of one process.

    Args:
        lr: the learning rate for one process.
        world_size: number of ranks, or any other ratio of the new global batch to the old one, above 0.
        rule: ``linear``: ``lr * world_size``, for SGD (Goyal et al. 2017, arXiv:1706.02677); ``sqrt``:
            ``lr * sqrt(world_size)``, for Adam (Malladi et al. 2022, arXiv:2205.10287); ``none``: ``lr``.

    Raises:
        ValueError: the rule is another word, or ``world_size`` is not above 0.
    """
    if not world_size > 0:
        raise ValueError(
            f"world_size={world_size}: give a number above 0, such as the number of ranks"
        )
    if rule == "linear":
        return lr * world_size
    if rule == "sqrt":
        return lr * math.sqrt(world_size)
    if rule == "none":
        return lr
    raise ValueError(f"rule={rule!r}: use linear, sqrt or none")


def lr_factor(config: Config) -> float:
    """Return the factor of ``train.lr_scaling``, which depends on the global batch and not on the ranks."""
    train = config.train
    if train.lr_scaling == "none" or train.lr_base_batch is None:
        return 1.0
    ratio = train.batch_size / train.lr_base_batch
    return ratio if train.lr_scaling == "linear" else math.sqrt(ratio)


def learning_rate_lines(config: Config, optimizer: Optimizer) -> Iterator[str]:
    """Yield a line on the scaled peak learning rate, if ``train.lr_scaling`` is set."""
    train = config.train
    if train.lr_scaling == "none":
        return
    peak = train.lr * lr_factor(config)
    rates = list(
        dict.fromkeys(float(group.get("initial_lr", peak)) for group in optimizer.param_groups)
    )
    start = f"peak learning rate {peak:.4g}: train.lr {train.lr:.4g}"
    if rates != [peak]:
        start = f"peak learning rates {', '.join(f'{rate:.4g}' for rate in rates)}: the task's"
    rule = "the square root of " if train.lr_scaling == "sqrt" else ""
    yield (
        f"{start} times {rule}train.batch_size {train.batch_size} / train.lr_base_batch "
        f"{train.lr_base_batch} ({train.lr_scaling})"
    )
