"""Accumulation over calls: ``accumulation_steps`` calls of ``training_step`` make one optimizer step."""

from typing import Any

from torch import nn

from hpcrun.checkpoint.state.training import RankPart
from hpcrun.checkpoint.state.tree import named_parameters
from hpcrun.errors import UserError
from hpcrun.train.step.gate import StepGate


class Accumulation:
    """Counts the calls since the last optimizer step; the gate keeps the count for checkpoints.

    Attributes:
        calls: calls per optimizer step.
    """

    def __init__(self, calls: int, gate: StepGate) -> None:
        """Raise ValueError unless ``calls`` is a whole number from 1 on."""
        if not isinstance(calls, int) or calls < 1:
            raise ValueError(f"accumulation_steps={calls!r} is not a whole number from 1 on")
        self.calls, self._gate = calls, gate
        self._dropped = 0

    @property
    def begins(self) -> bool:
        """True if the next call is the first of an optimizer step."""
        return self._gate.accumulated == 0

    @property
    def updates(self) -> bool:
        """True if the next call makes the optimizer step."""
        return self._gate.accumulated + 1 >= self.calls

    def count(self) -> bool:
        """Count a call; return True if the optimizer step is due."""
        due = self.updates
        self._gate.accumulated = 0 if due else self._gate.accumulated + 1
        return due

    def restart(self) -> None:
        """Forget the calls since the last optimizer step."""
        self._gate.accumulated = 0

    def fail(self) -> None:
        """Drop the gradients of the earlier calls, because a call has raised an exception."""
        self._dropped = self._gate.accumulated
        self.restart()

    def told(self) -> str:
        """Return a line about gradients that :meth:`fail` has dropped, once; empty without any."""
        dropped, self._dropped = self._dropped, 0
        if not dropped:
            return ""
        return (
            f"training_step: call {dropped + 1} of {self.calls} has raised an exception, and the training "
            f"goes on, so the gradients of {dropped} earlier calls are dropped, and this call is the first "
            "of an optimizer step; check the batch before the call, and skip it on all ranks"
        )

    def require_none(self, form: str) -> None:
        """Raise UserError between the calls of an optimizer step: ``form`` cannot hold the gradients."""
        if not self.begins:
            raise UserError(
                f"{form} cannot hold the gradients of {self._gate.accumulated} of {self.calls} calls "
                "(accumulation_steps); save after a call with result.updated"
            )

    def part(self, model: nn.Module, *, readable: bool) -> RankPart:
        """Return the part of a checkpoint that holds this rank's gradients between the calls.

        Args:
            readable: False under FSDP, which does not give a rank's gradients before they are reduced.
        """

        def capture() -> Any:
            if self.begins:
                return None
            if not readable:
                self.require_none("a checkpoint under FSDP")
            return {
                "calls": self._gate.accumulated,
                "of": self.calls,
                "gradients": {
                    name: parameter.grad.detach().to("cpu", copy=True)
                    for name, parameter in named_parameters(model)
                    if parameter.grad is not None
                },
            }

        def restore(saved: Any) -> str | None:
            for _, parameter in named_parameters(model):
                parameter.grad = None
            calls, self._gate.accumulated = self._gate.accumulated, 0
            if saved is None and not calls:
                return None
            if saved is None or saved["of"] != self.calls or not readable:
                return (
                    f"the gradients of the last {calls or saved['calls']} calls are dropped: they belong to "
                    "another number of ranks, another accumulation_steps or another parallelism"
                )
            self._gate.accumulated = saved["calls"]
            for name, parameter in named_parameters(model):
                if name in saved["gradients"]:
                    parameter.grad = saved["gradients"][name].to(parameter.device, parameter.dtype)
            return None

        return RankPart(capture, restore)
