"""The loss function of a step, and the result of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hpcrun.train.step.gate import StepDecision
from hpcrun.train.step.weighting import Weight

LossFunction = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of an optimizer step. Tensors are on the device, so that reading one waits for the device.

    Attributes:
        loss: this rank's mean loss, float32 of shape (). In a weighted step it is this rank's contribution:
            the mean over ranks is the weighted mean.
        gradient_norm: global 2-norm before clipping, shape (); None without clipping.
        decision: decision on the step; see :attr:`skipped`.
        learning_rate: used in this step by the first parameter group.
        weighted: in a weighted step, the loss of each micro-batch and its factor.
        weights: the weights of the micro-batches, as the caller gave them.
    """

    loss: Tensor
    gradient_norm: Tensor | None
    decision: StepDecision
    learning_rate: float
    weighted: Sequence[tuple[Tensor, Weight]] = ()
    weights: Sequence[Weight] = ()

    @property
    def skipped(self) -> bool:
        """True if a gradient was not finite, so that nothing changed. May wait for the device."""
        return self.decision.skipped
