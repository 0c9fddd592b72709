"""Compiled steps against uncompiled steps: two micro-batches, CUDA graphs, and both."""

import shutil
from typing import Any

import torch
from gpulib.models import adamw, batches, build, next_byte
from gpulib.sizes import SIZES

from acceptancelib.outcome import REPORT, Job, Outcome, needs_gpu
from acceptancelib.world import device_of
from hpcrun.config import AMPConfig, resolve
from hpcrun.config.config import override_layer
from hpcrun.devices.vendor import CompileMode
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.build import compile_mode
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.model.prepare import Preparation
from hpcrun.train.step.trainer import DistributedAMPTrainer

_STEPS = 4
CLOSE = 1e-3
"""Maximum relative distance between the losses of compiled and uncompiled steps in fp32."""

_COMPILERS = ("cc", "gcc", "g++", "c++", "clang")


def check(job: Job) -> list[Outcome]:
    """Compare the losses; a mode with CUDA graphs needs a GPU."""
    if not any(shutil.which(name) for name in _COMPILERS):
        remedy = "load a compiler (module load gcc), or do not use train.compile"
        return [Outcome("compile", "unknown", "there is no C compiler here", remedy)]
    outcomes = [_outcome(job, "compile", "default", 2)]
    if job.simulated:
        return [*outcomes, needs_gpu("CUDA graphs"), needs_gpu("CUDA graphs with accumulation")]
    outcomes.append(_outcome(job, "CUDA graphs", "reduce-overhead", 1))
    outcomes.append(_outcome(job, "CUDA graphs with accumulation", "reduce-overhead", 2))
    return outcomes


def _outcome(job: Job, name: str, mode: CompileMode, parts: int) -> Outcome:
    distributed = DistributedConfig(device_ids=() if job.simulated else (0,))
    wanted = [
        "task=language-model", "train.compile=true", f"train.compile_mode={mode}",
        f"train.accumulation={parts}",
    ]  # fmt: skip
    # The mode that a run uses: without CUDA graphs if there are several micro-batches.
    used = compile_mode(resolve([override_layer(wanted)]), distributed, "single")
    plain, compiled = (losses(job, distributed, it, parts) for it in (None, used))
    return compare(name, str(used), parts, plain, compiled)


def compare(name: str, used: str, parts: int, plain: list[float], compiled: list[float]) -> Outcome:
    """Return the outcome of two sequences of losses."""
    furthest = max(abs(a / b - 1) for a, b in zip(compiled, plain, strict=True))
    details = {"mode": used, "plain": plain, "compiled": compiled}
    line = f"mode {used}, {parts} micro-batches: losses within {furthest:.1e} of uncompiled steps"
    if not furthest < CLOSE:  # not `>=`, which is false for NaN
        return Outcome(name, "fail", line, "do not use train.compile here; " + REPORT, details)
    return Outcome(name, "pass", line, details=details)


def losses(
    job: Job, distributed: DistributedConfig, mode: CompileMode | None, parts: int
) -> list[float]:
    """Return the losses of some steps, read after the last step: a graph's replay reuses its memory."""
    torch._dynamo.reset()
    device: Any = device_of(job)
    trainer = DistributedAMPTrainer(
        build(SIZES["tiny"], torch.device("cpu"), torch.float32),
        adamw,
        distributed=distributed,
        parallel="single",
        amp=AMPConfig(dtype="fp32"),
        clip_norm=1.0,
        device=device,
        preparation=Preparation(compile=mode),
    )
    trainer.wrap_model()
    data = batches(SIZES["tiny"], torch.device("cpu"), _STEPS)
    micro = [MicroBatches(batch.to(device).chunk(parts)) for batch in data]
    steps = [trainer.training_step(batch, next_byte) for batch in micro]
    return [step.loss.item() for step in steps]
