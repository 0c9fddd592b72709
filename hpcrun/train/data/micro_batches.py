"""MicroBatches: the micro-batches of one optimizer step."""

from typing import Any


class MicroBatches(list[Any]):
    """The micro-batches of one optimizer step on a rank, a list (gradient accumulation).

    The type distinguishes several micro-batches from one batch that is a list, such as ``[inputs, targets]``
    of a ``torch.utils.data.DataLoader``: ``trainer.training_step(MicroBatches([first, second]), loss)``.
    :func:`hpcrun.training_steps` returns this type for each step.
    """

    __slots__ = ()
