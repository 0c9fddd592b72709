"""Whether an optimiser step is taken: finite gradients, the loss scale, and what is remembered of both.

A step with a gradient that is not finite changes nothing: no weight, no moment, no decay, no schedule. Where
the gradients are reduced over ranks before they are judged, all ranks come to the same verdict by themselves.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpcrun.config import AMPConfig

SCALES_KEPT = 1000
"""Changes of the loss scale that are remembered: at the usual growth interval, some million steps."""

_NEVER = 2**31 - 1


class Verdict:
    """What became of one step. On a GPU nobody waits for it: it is there when the next step is judged."""

    __slots__ = ("_gate", "_skipped")

    def __init__(self, gate: "StepGate") -> None:
        self._gate = gate
        self._skipped: bool | None = None

    @property
    def skipped(self) -> bool:
        """Whether the step was left out; waits for the device where that is not known yet."""
        if self._skipped is None:
            self._gate.settle()
        assert self._skipped is not None
        return self._skipped

    def peek(self) -> bool:
        """As ``skipped``, but nothing follows from it yet, so that nobody who counts misses one."""
        return self._gate.found_last() if self._skipped is None else self._skipped


class StepGate:
    """Takes optimiser steps, but those whose gradients are not finite.

    ``steps`` counts all that were asked for, ``skipped`` and ``skipped_in_row`` those left out, ``scales``
    holds (steps so far, the loss scale from there on) for its latest changes. All are the same on every rank.
    """

    late_on = frozenset({"cuda"})
    """Device types on which reading a number waits for all work before it: there the fused optimiser is
    told on the device, and the verdict is read a step later."""

    def __init__(
        self, amp: AMPConfig, device: torch.device, after: Callable[[bool, float], None]
    ) -> None:
        """``after``: told once of every step, in order: whether it was skipped, and the factor by which
        the loss scale changed."""
        self._amp, self._after = amp, after
        self.scaler = torch.amp.GradScaler(
            device.type,
            init_scale=amp.init_scale,
            growth_factor=amp.growth_factor,
            backoff_factor=amp.backoff_factor,
            growth_interval=amp.growth_interval if amp.dynamic else _NEVER,
            enabled=amp.dtype == "fp16",
        )
        self.at_once = False
        """Whether every verdict is read at once, because ``after`` has to act before the next backward."""
        self.steps = self.skipped = self.skipped_in_row = 0
        self.scales: deque[tuple[int, float]] = deque(maxlen=SCALES_KEPT)
        self._scale = amp.init_scale
        self._pending: Verdict | None = None
        self._readback: _Readback | None = None

    def step(
        self, optimizer: Optimizer, clip: Callable[[], Tensor] | None
    ) -> tuple[Tensor | None, Verdict]:
        """Judge the gradients and take the step if they are finite.

        Args:
            clip: clips the gradients, no longer scaled, and returns their global norm before.

        Returns:
            The norm, None without clipping, and the verdict.
        """
        self.scaler.unscale_(optimizer)
        norm = clip() if clip is not None else None
        self.settle()
        verdict = Verdict(self)
        found = self._not_finite(optimizer, norm)
        if isinstance(found, Tensor) and self._late(optimizer, found):
            # The attributes by which torch's own GradScaler tells a fused optimiser.
            optimizer.grad_scale, optimizer.found_inf = None, found  # type: ignore[attr-defined]
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            self._update()
            self._readback = self._readback or _Readback(found.device)
            scaled = self.scaler.is_enabled()
            self._readback.send(found, self.scaler._scale if scaled else None)
            self._pending = verdict
        else:
            skipped = bool(found)
            if not skipped:
                optimizer.step()
            self._update()
            self._record(verdict, skipped, self.scaler.get_scale())
        return norm, verdict

    @property
    def pending(self) -> bool:
        """Whether the last step's verdict is still on its way."""
        return self._pending is not None

    def settle(self) -> None:
        """Wait for the last step's verdict, if it is still on its way."""
        if self._pending is not None and self._readback is not None:
            verdict, self._pending = self._pending, None
            found, scale = self._readback.read()
            self._record(verdict, found > 0, scale)

    def found_last(self) -> bool:
        """Whether the step whose verdict is on its way is skipped; waits for it, and records nothing."""
        assert self._readback is not None
        return self._readback.read()[0] > 0

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state and the counters: plain numbers."""
        self.settle()
        return {
            **self.scaler.state_dict(),
            "steps": self.steps,
            "skipped": self.skipped,
            "skipped_in_row": self.skipped_in_row,
            "scales": [list(change) for change in self.scales],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what :meth:`state_dict` gave, or a plain GradScaler's."""
        self.settle()
        if self.scaler.is_enabled() and "scale" in state:
            self.scaler.load_state_dict(state)
            self._scale = self.scaler.get_scale()
        self.steps = state.get("steps", 0)
        self.skipped = state.get("skipped", 0)
        self.skipped_in_row = state.get("skipped_in_row", 0)
        self.scales = deque(
            ((steps, scale) for steps, scale in state.get("scales", ())), maxlen=SCALES_KEPT
        )

    def _not_finite(self, optimizer: Optimizer, norm: Tensor | None) -> Tensor | bool:
        """Whether any gradient is infinite or not a number: as a scalar, 1.0 if so, while on a device."""
        if self.scaler.is_enabled():
            # unscale_ has looked at every gradient already.
            found = list(self.scaler._found_inf_per_device(optimizer).values())
            return found[0] if len(found) == 1 else torch.stack(found).amax()
        if norm is None:
            return not_finite(optimizer)
        if norm.device.type not in self.late_on:
            return not math.isfinite(norm.item())
        return norm.isfinite().logical_not().to(torch.float32)

    def _late(self, optimizer: Optimizer, found: Tensor) -> bool:
        # Not the first step: torch's fused SGD leaves its momentum without a value when that is skipped.
        return (
            found.device.type in self.late_on
            and not self.at_once
            and bool(optimizer.state)
            and getattr(optimizer, "_step_supports_amp_scaling", False)
        )

    def _update(self) -> None:
        if self.scaler.is_enabled():
            self.scaler.update(None if self._amp.dynamic else self._amp.init_scale)

    def _record(self, verdict: Verdict, skipped: bool, scale: float) -> None:
        verdict._skipped = skipped
        self.steps += 1
        self.skipped += skipped
        self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0
        factor = 1.0
        if self.scaler.is_enabled() and scale != self._scale:
            factor, self._scale = scale / self._scale, scale
            self.scales.append((self.steps, scale))
        self._after(skipped, factor)


class _Readback:
    """The verdict and the loss scale on their way from a device to the host."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(2, pin_memory=on_gpu)
        self._found, self._scale = self._host.unbind()
        self._event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def send(self, found: Tensor, scale: Tensor | None) -> None:
        """Start on the way; ``found`` may be changed afterwards."""
        self._found.copy_(found, non_blocking=True)
        if scale is not None:
            self._scale.copy_(scale, non_blocking=True)
        if self._event is not None:
            # On the stream of the copies: the trainer's device need not be the current one.
            self._event.record(torch.cuda.current_stream(found.device))

    def read(self) -> tuple[float, float]:
        """Both numbers, when they have come."""
        if self._event is not None:
            self._event.synchronize()
        found, scale = self._host.tolist()
        return found, scale


def not_finite(optimizer: Optimizer) -> Tensor:
    """A scalar, 1.0 if any gradient of the optimiser's parameters is infinite or not a number.

    The kernel is the GradScaler's, with a scale of one: one pass over all gradients, half the time of
    their norm, and reduced over the ranks where they are sharded.
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
