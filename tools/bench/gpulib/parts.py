"""The measurements: each part is a function of a job and returns plain figures."""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpulib.models import batches, next_byte, trainer_for
from gpulib.sizes import SIZES, Size
from hpcrun.checkpoint.folder import folder_engine, folder_store
from hpcrun.devices.accelerator import is_accelerator
from hpcrun.ranks.collective import Ranks
from hpcrun.train.determinism import choose_kernels, fix_compiler
from hpcrun.train.metrics.timing import peak_here
from hpcrun.train.step.trainer import DistributedAMPTrainer

Figures = dict[str, Any]

_WARM = 3
"""Warm-up steps before the timed steps: compilation, the allocator, the first step's moments."""


@dataclass(frozen=True)
class Job:
    """The task of one process. ``batch``: samples per step, instead of the size's default."""

    part: str
    device: str
    size: str
    batch: int
    steps: int
    compiled: bool
    folder: str

    @property
    def model(self) -> Size:
        return replace(SIZES[self.size], batch=self.batch)


def say(text: str) -> None:
    """Print a line of progress to stderr."""
    print(f"gpu: {text}", file=sys.stderr, flush=True)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def speed(job: Job, device: torch.device) -> Figures:
    """Return the mean of whole training steps, without a synchronization between them, as in a run."""
    size = job.model
    say(f"{job.size}: making {size.parameters / 1e9:.3f} B random weights")
    trainer, weights = trainer_for(size, device, compiled=job.compiled)
    data = batches(size, device, 4)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    what = "compiling, which may take minutes, and the first step" if job.compiled else "first step"
    say(f"{job.size}: {what}")
    first = began = time.perf_counter()
    for step in range(_WARM + job.steps):
        result = trainer.training_step(data[step % len(data)], next_byte)
        if step == 0:
            wait(device)
            first = time.perf_counter() - began
            say(f"{job.size}: the first step took {first:.1f} s")
        if step == _WARM - 1:
            wait(device)
            began = time.perf_counter()
    wait(device)
    typical = (time.perf_counter() - began) / job.steps
    tokens = size.batch * size.context / typical
    peak = peak_here(device, "bf16", None)
    on_gpu = device.type == "cuda"
    return {
        "parameters": sum(parameter.numel() for parameter in trainer.module.parameters()),
        "weights": weights,
        "batch": size.batch,
        "context": size.context,
        "step_seconds": typical,
        "tokens_per_second": tokens,
        "mfu": None if peak is None else tokens * size.flops_per_token / peak,
        "peak_gigabytes": torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else None,
        "first_step_seconds": first,
        "loss": result.loss.item(),
    }


def deterministic(job: Job, device: torch.device) -> Figures:
    """Return the figures of :func:`speed` with train.deterministic=true."""
    choose_kernels(True)
    fix_compiler(True, "default")
    return speed(job, device)


def checkpoint(job: Job, device: torch.device) -> Figures:
    """Measure the second checkpoint of a training's whole state, with its memory already allocated.

    Then restore it after further steps, and compare the weights with the saved weights.
    """
    size = job.model
    folder = Path(tempfile.mkdtemp(prefix="hpcrun-bench-", dir=job.folder or None))
    try:
        _require_room(folder, size)
        say(f"checkpoint: some steps of {job.size}, and two saves into {folder}")
        trainer, _ = trainer_for(size, device, compiled=job.compiled)
        return _saves(trainer, batches(size, device, 2), device, folder, job.steps)
    finally:
        shutil.rmtree(folder)


def _require_room(folder: Path, size: Size) -> None:
    # Two checkpoints of weights and two moments, at most in fp32.
    need, free = 2 * 12 * size.parameters, shutil.disk_usage(folder).free
    if free < 1.05 * need:
        raise OSError(
            f"{folder.parent} has {free / 1e9:.0f} GB free, and two checkpoints take {need / 1e9:.0f} GB; "
            "name another folder with --dir"
        )


def _saves(
    trainer: DistributedAMPTrainer,
    data: list[Tensor],
    device: torch.device,
    folder: Path,
    steps: int,
) -> Figures:
    def some_steps(count: int) -> float:
        wait(device)
        began = time.perf_counter()
        for step in range(count):
            trainer.training_step(data[step % 2], next_byte)
        wait(device)
        return time.perf_counter() - began

    some_steps(_WARM)
    plain = some_steps(steps) / steps
    figures: Figures = {"step_seconds_without": plain}
    parameters = list(trainer.module.parameters())
    saved: list[Tensor] = []
    pinned = is_accelerator(device)
    engine = folder_engine(folder_store(folder), Ranks(), pinned=pinned)
    for number in (1, 2):
        saved.clear()
        saved += (parameter.detach().clone() for parameter in parameters)
        wait(device)
        began = time.perf_counter()
        trainer.start_checkpoint(engine, number)
        called, beside = time.perf_counter() - began, 0
        while not (outcomes := engine.poll()):
            some_steps(1)
            beside += 1
        outcome = outcomes[-1]
        if not outcome.ok:
            raise RuntimeError(f"the checkpoint was not written: {outcome.error}")
        say(f"checkpoint: {outcome.bytes / 1e9:.2f} GB committed after {outcome.seconds:.2f} s")
        figures |= {
            "gigabytes": outcome.bytes / 1e9,
            "call_seconds": called,
            "stalled_seconds": outcome.stalled,
            "committed_seconds": outcome.seconds,
            "steps_beside": beside,
            "notes": list(outcome.notes),
        }
    some_steps(1)
    began = time.perf_counter()
    restored = trainer.load_checkpoint(folder)
    wait(device)
    figures["restore_seconds"] = time.perf_counter() - began
    figures["restored"] = restored is not None and all(
        torch.equal(value, parameter) for value, parameter in zip(saved, parameters, strict=True)
    )
    figures["copy_seconds"] = _copy_seconds(parameters, device)
    if not figures["restored"]:
        figures["wrong"] = "the restored weights are not those that were saved"
    return figures


def _copy_seconds(parameters: list[nn.Parameter], device: torch.device) -> float:
    """Return the minimum time of a save: a copy of the weights to pinned memory."""
    host = [torch.empty_like(p, device="cpu", pin_memory=device.type == "cuda") for p in parameters]
    wait(device)
    began = time.perf_counter()
    for target, source in zip(host, parameters, strict=True):
        target.copy_(source.detach(), non_blocking=True)
    wait(device)
    return time.perf_counter() - began


PARTS: dict[str, Callable[[Job, torch.device], Figures]] = {
    "speed": speed,
    "deterministic": deterministic,
    "checkpoint": checkpoint,
}
