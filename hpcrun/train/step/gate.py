"""StepGate: skip optimizer steps with non-finite gradients, and keep the loss scale and the counters.

A skipped step changes nothing: no weight, no moment, no decay, no schedule. Gradients are reduced over ranks
before the check, so all ranks reach the same decision without further communication.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Container
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpcrun.config import AMPConfig
from hpcrun.devices import accelerator

_NEVER = 2**31 - 1


class StepDecision:
    """Decision about one step. On a GPU the host reads it only when it checks the next step."""

    __slots__ = ("_gate", "_skipped")

    def __init__(self, gate: "StepGate", skipped: bool | None = None) -> None:
        self._gate, self._skipped = gate, skipped

    @property
    def skipped(self) -> bool:
        """True if the step was skipped; waits for the device if the decision is not known yet."""
        if self._skipped is None:
            self._gate.resolve_pending()
        assert self._skipped is not None
        return self._skipped

    def peek(self) -> bool:
        """Return ``skipped`` without recording the decision; counters and callbacks see it later."""
        return self._gate.found_last() if self._skipped is None else self._skipped


class StepGate:
    """Takes optimizer steps with finite gradients and skips the rest.

    ``steps`` counts all steps, ``skipped`` the skipped ones, ``skipped_in_row`` the consecutive ones up to
    now. ``accumulated`` counts the calls since the last step (``accumulation_steps``). All are the same on
    every rank.
    """

    late_on: Container[object] = accelerator.KINDS
    """Device types on which reading a number waits for all queued work. There the fused optimizer reads the
    decision on the device, and the host reads it one step later."""

    def __init__(self, amp: AMPConfig, device: torch.device, after: Callable[[bool], None]) -> None:
        """``after``: called once for every step, in order; True: the step was skipped."""
        self._amp, self._after = amp, after
        self.scaler = torch.amp.GradScaler(
            device.type,
            init_scale=amp.init_scale,
            growth_factor=amp.growth_factor,
            backoff_factor=amp.backoff_factor,
            growth_interval=amp.growth_interval if amp.dynamic else _NEVER,
            enabled=amp.dtype == "fp16",
        )
        self.steps = self.skipped = self.skipped_in_row = 0
        self.accumulated = 0
        self._pending: StepDecision | None = None
        self._readback: _Readback | None = None

    def step(
        self, optimizer: Optimizer, clip: Callable[[], Tensor] | None
    ) -> tuple[Tensor | None, StepDecision]:
        """Check the gradients and take the step if they are finite.

        Returns:
            The norm (None without clipping) and the decision.
        """
        self.scaler.unscale_(optimizer)
        norm = clip() if clip is not None else None
        self.resolve_pending()
        decision = StepDecision(self)
        found = self._not_finite(optimizer, norm)
        if isinstance(found, Tensor) and self._late(optimizer, found):
            # Attributes that torch's own GradScaler sets for a fused optimizer.
            optimizer.grad_scale, optimizer.found_inf = None, found  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            self._update()
            self._readback = self._readback or _Readback(found.device)
            self._readback.send(found)
            self._pending = decision
        else:
            skipped = bool(found)
            if not skipped:
                optimizer.step()
            self._update()
            self._record(decision, skipped)
        return norm, decision

    @property
    def pending(self) -> bool:
        """True if the host has not read the last step's decision yet."""
        return self._pending is not None

    def resolve_pending(self) -> None:
        """Wait for the last step's decision and record it, if it is still pending."""
        if self._pending is not None and self._readback is not None:
            decision, self._pending = self._pending, None
            self._record(decision, self._readback.read())

    def found_last(self) -> bool:
        """Return True if the pending step is skipped; waits for the decision and records nothing."""
        assert self._readback is not None
        return self._readback.read()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state and the counters: plain numbers."""
        self.resolve_pending()
        return {
            **self.scaler.state_dict(),
            "steps": self.steps,
            "skipped": self.skipped,
            "skipped_in_row": self.skipped_in_row,
            **({"accumulated": self.accumulated} if self.accumulated else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, or the state of a plain GradScaler."""
        self.resolve_pending()
        if self.scaler.is_enabled() and "scale" in state:
            self.scaler.load_state_dict(state)
        self.steps = state.get("steps", 0)
        self.skipped = state.get("skipped", 0)
        self.skipped_in_row = state.get("skipped_in_row", 0)
        self.accumulated = state.get("accumulated", 0)

    def _not_finite(self, optimizer: Optimizer, norm: Tensor | None) -> Tensor | bool:
        """Return a true value if any gradient is infinite or NaN; a scalar on the device is 1.0 if so."""
        if self.scaler.is_enabled():
            # unscale_ has already checked every gradient.
            found = list(self.scaler._found_inf_per_device(optimizer).values())
            return found[0] if len(found) == 1 else torch.stack(found).amax()
        if norm is None:
            return not_finite(optimizer)
        if norm.device.type not in self.late_on:
            return not math.isfinite(norm.item())
        return norm.isfinite().logical_not().to(torch.float32)

    def _late(self, optimizer: Optimizer, found: Tensor) -> bool:
        return (
            found.device.type in self.late_on and reads_decision(optimizer) and _started(optimizer)
        )

    def _update(self) -> None:
        if self.scaler.is_enabled():
            self.scaler.update(None if self._amp.dynamic else self._amp.init_scale)

    def _record(self, decision: StepDecision, skipped: bool) -> None:
        decision._skipped = skipped
        self.steps += 1
        self.skipped += skipped
        self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0
        self._after(skipped)


def reads_decision(optimizer: Optimizer) -> bool:
    """Return True for torch's own fused optimizers: their kernels read the attribute ``found_inf``.

    Optimizers of other libraries have the flag ``_step_supports_amp_scaling`` too, but Apex and
    TransformerEngine read the decision from an argument of ``step``, and some read it nowhere.
    """
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in optimizer.param_groups)
    )


def _started(optimizer: Optimizer) -> bool:
    """Return True if every group with gradients has taken a step before.

    torch's fused SGD does not initialize the momentum of a group in a skipped step.
    """
    return all(
        next((p in optimizer.state for p in group["params"] if p.grad is not None), True)
        for group in optimizer.param_groups
    )


class _Readback:
    """Asynchronous copy of the decision from the device to the host."""

    def __init__(self, device: torch.device) -> None:
        self._host = accelerator.host_zeros(1, device)
        on_gpu = accelerator.is_accelerator(device)
        self._event = accelerator.event(device) if on_gpu else None

    def send(self, found: Tensor) -> None:
        """Start the copy; ``found`` may change afterwards."""
        self._host.copy_(found, non_blocking=True)
        if self._event is not None:
            # On the stream of the copies: the trainer's device may not be the current device.
            accelerator.record(self._event, found.device)

    def read(self) -> bool:
        """Wait for the copy; return True if the step was skipped."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.item() > 0


def not_finite(optimizer: Optimizer) -> Tensor:
    """Return a scalar, 1.0 if any gradient of the optimizer's parameters is infinite or NaN.

    Uses the GradScaler's kernel with a scale of one: one pass over all gradients, which takes half the time
    of their norm. Sharded gradients are reduced over the ranks.
    """
    kinds: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                gradient = gradient.coalesce()._values()
            if gradient.is_complex():
                gradient = torch.view_as_real(gradient)
            kinds[gradient.device, gradient.dtype].append(gradient)
    found = None
    for (device, _), gradients in kinds.items():
        here = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, here, _one(device))
        found = here if found is None else torch.maximum(found, here.to(found.device))
    return torch.zeros(()) if found is None else found


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def trained_by(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """Return all parameters of the optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
