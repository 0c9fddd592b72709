"""A training step in each precision, with one and two micro-batches, and a step with a planted inf."""

import math
from typing import Any, Literal

import torch
from gpulib.models import adamw, batches, build, next_byte
from gpulib.sizes import SIZES
from torch import Tensor, nn

from acceptancelib.outcome import REPORT, Job, Outcome, needs_gpu
from acceptancelib.world import device_of
from hpcrun.config import AMPConfig
from hpcrun.devices import vendor
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.step.gate import StepGate
from hpcrun.train.step.trainer import AMPTrainer

Precision = Literal["fp32", "tf32", "bf16", "fp16"]

_CPU = torch.device("cpu")

TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 2e-2, "fp16": 5e-3}
"""Maximum relative distance of the first loss from the loss in fp32 on the CPU."""


def check(job: Job) -> list[Outcome]:
    """Return an outcome for each precision."""
    device = device_of(job)
    if job.simulated:
        # The path of a GPU: the optimizer's kernel reads the decision, the host reads it later.
        StepGate.late_on = frozenset({"cpu"})
    expected = _first_loss()
    return [_outcome(job, precision, device, expected) for precision in TOLERANCE]


def _outcome(job: Job, precision: Precision, device: torch.device, expected: float) -> Outcome:
    if precision == "bf16" and not job.simulated and not vendor.has_bf16(device):
        return needs_gpu(precision, f"a GPU with {precision}")
    found = {parts: measure(precision, device, parts) for parts in (1, 2)}
    wrong = [
        f"{fault} (accumulation {parts})"
        for parts, figures in found.items()
        for fault in faults(figures, expected, TOLERANCE[precision])
    ]
    details = {"expected": expected, **{str(parts): figures for parts, figures in found.items()}}
    if wrong:
        return Outcome(precision, "fail", "; ".join(wrong), REPORT, details)
    losses = " and ".join(f"{figures['losses'][0]:.4f}" for figures in found.values())
    line = f"first losses {losses} with 1 and 2 micro-batches, {expected:.4f} in fp32 on the CPU; a planted "
    return Outcome(precision, "pass", f"{line}inf changed nothing", details=details)


def faults(figures: dict[str, Any], expected: float, tolerance: float) -> list[str]:
    """Return sentences about what is wrong with the figures of :func:`measure`."""
    found = []
    if not all(math.isfinite(loss) for loss in figures["losses"]):
        found.append(f"losses {figures['losses']}")
    elif abs(figures["losses"][0] / expected - 1) > tolerance:
        found.append(f"first loss {figures['losses'][0]:.4f} instead of {expected:.4f}")
    if figures["elsewhere"]:
        found.append(f"weights on {figures['elsewhere']}")
    if figures["skipped"]:
        found.append("a finite step was skipped")
    if not figures["late"]:
        found.append("the host waited for the decision about a step")
    if not figures["inf_skipped"]:
        found.append("a step with a planted inf was not skipped")
    if figures["inf_changed"]:
        found.append(f"a planted inf changed {figures['inf_changed']}")
    if not figures["moved"]:
        found.append("the step after the planted inf changed no weight")
    return found


def measure(precision: Precision, device: torch.device, parts: int) -> dict[str, Any]:
    """Take two finite steps, a step with an inf, and another finite step; return the findings."""
    size = SIZES["tiny"]
    # Weights and bytes from the CPU: another device has other random numbers.
    trainer = AMPTrainer(
        build(size, _CPU, torch.float32),
        adamw,
        amp=AMPConfig(dtype=precision, init_scale=1024.0),
        clip_norm=1.0,
        device=device,
    )
    micro = MicroBatches(batches(size, _CPU, 1)[0].to(device).chunk(parts))
    steps = [trainer.training_step(micro, next_byte) for _ in range(2)]
    late = trainer.gate.pending
    skipped = any(step.skipped for step in steps)
    elsewhere = sorted({str(p.device) for p in trainer.module.parameters() if p.device != device})
    before = _state(trainer)
    planted = trainer.training_step(micro, _infinite)
    inf_skipped = planted.skipped
    changed = [
        name for name, value in _state(trainer).items() if not torch.equal(value, before[name])
    ]
    steps.append(trainer.training_step(micro, next_byte))
    now = _state(trainer)
    return {
        "losses": [step.loss.item() for step in steps],
        "skipped": skipped or steps[-1].skipped,
        "late": late,
        "elsewhere": ", ".join(elsewhere),
        "inf_skipped": inf_skipped,
        "inf_changed": ", ".join(changed[:3]),
        "moved": any(not torch.equal(value, before[name]) for name, value in now.items()),
    }


def _infinite(model: nn.Module, batch: Tensor) -> Tensor:
    return next_byte(model, batch) * math.inf


def _first_loss() -> float:
    """Return the loss of the initial weights in fp32, from torch only."""
    with torch.no_grad():
        model = build(SIZES["tiny"], _CPU, torch.float32)
        return next_byte(model, batches(SIZES["tiny"], _CPU, 1)[0]).item()


def _state(trainer: AMPTrainer) -> dict[str, Tensor]:
    """Return copies of the weights and of the optimizer's moments, by name."""
    found = {
        f"weight {name}": value.detach().clone()
        for name, value in trainer.module.named_parameters()
    }
    for number, kept in trainer.optimizer.state_dict()["state"].items():
        found |= {f"{name} {number}": value.clone() for name, value in kept.items()}
    return found
