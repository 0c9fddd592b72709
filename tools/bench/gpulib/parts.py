"""The measurements and comparisons: each part is a function of a job and returns plain figures."""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpulib.models import adamw, batches, build, next_byte, one_rank, trainer_for
from gpulib.sizes import REPEATED, SIZES, Size
from hpcrun.checkpoint.folder import folder_engine, folder_store
from hpcrun.config import AMPConfig
from hpcrun.devices.accelerator import is_accelerator
from hpcrun.ranks.collective import Ranks
from hpcrun.train.determinism import choose_kernels, fix_compiler
from hpcrun.train.metrics.timing import peak_here
from hpcrun.train.parallel.fsdp import FSDPStrategy
from hpcrun.train.parallel.strategies import DDPStrategy, Strategy
from hpcrun.train.step.trainer import AMPTrainer, DistributedAMPTrainer

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
        result = trainer.training_step([data[step % len(data)]], next_byte)
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
            trainer.training_step([data[step % 2]], next_byte)
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


@dataclass(frozen=True)
class _Learnt:
    losses: list[Tensor]
    weights: list[Tensor]
    scale: float


def parity(_job: Job, device: torch.device) -> Figures:
    """Compare fp16 training with torch's own loop bit by bit: losses, weights and scale after 50 steps.

    Torch's loop runs twice; if its two results differ, the comparison has no answer.
    """
    say("fp16 loss scaling: 50 small steps against torch's own loop")
    choose_kernels(True)
    size = SIZES["tiny"]
    data = batches(size, device, 4)
    amp = AMPConfig(dtype="fp16", init_scale=2.0**20, growth_interval=5)
    model = build(size, device, torch.float32)
    trainer = AMPTrainer(model, adamw, amp=amp, clip_norm=1.0, device=device)
    losses = [trainer.training_step([data[step % 4]], next_byte).loss for step in range(50)]
    trainer.gate.resolve_pending()
    ours = _Learnt(losses, list(model.parameters()), trainer.scaler.get_scale())
    theirs, again = (_torchs_own(size, device, data, amp) for _ in range(2))
    figures: Figures = {
        "equal": _first_difference(ours, theirs) is None,
        "first_difference": _first_difference(ours, theirs),
        "torch_repeats": _first_difference(theirs, again) is None,
        "overflows": trainer.gate.skipped,
    }
    if figures["torch_repeats"] and not figures["equal"]:
        figures["wrong"] = (
            f"fp16 training differs from torch's own loop from step {figures['first_difference']} on"
        )
    return figures


def _torchs_own(size: Size, device: torch.device, data: list[Tensor], amp: AMPConfig) -> _Learnt:
    model = build(size, device, torch.float32)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler(
        device.type, init_scale=amp.init_scale, growth_interval=amp.growth_interval
    )
    losses = []
    for step in range(50):
        with torch.autocast(device.type, dtype=torch.float16):
            loss = next_byte(model, data[step % 4])
        torch.autograd.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return _Learnt(losses, list(model.parameters()), scaler.get_scale())


def _first_difference(one: _Learnt, other: _Learnt) -> int | None:
    """Return the first step with another loss, or the step after the last if only the final state differs."""
    for step, (a, b) in enumerate(zip(one.losses, other.losses, strict=True), start=1):
        if not torch.equal(a, b):
            return step
    weights = zip(one.weights, other.weights, strict=True)
    same = one.scale == other.scale and all(torch.equal(a, b) for a, b in weights)
    return None if same else len(one.losses) + 1


def repeat(job: Job, device: torch.device) -> Figures:
    """Compare two equal trainings bit by bit for each value of train.deterministic, and time their steps."""
    say("the same eight steps twice, with each value of train.deterministic")
    size = SIZES["tiny"] if job.size == "tiny" else REPEATED
    data = batches(size, device, 1)

    def learnt(wanted: Literal[True, False, "warn"]) -> tuple[list[Tensor], float]:
        choose_kernels(wanted)
        model = build(size, device, torch.float32)
        trainer = AMPTrainer(
            model, adamw, amp=AMPConfig(dtype="bf16"), clip_norm=1.0, device=device
        )
        seconds: list[float] = []
        for _ in range(_WARM + 5):
            wait(device)
            began = time.perf_counter()
            trainer.training_step(data, next_byte)
            wait(device)
            seconds.append(time.perf_counter() - began)
        return list(model.parameters()), min(seconds[_WARM:])

    def tried(wanted: Literal[True, False, "warn"]) -> tuple[bool, float]:
        (ones, first), (others, second) = learnt(wanted), learnt(wanted)
        same = all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))
        return same, min(first, second)

    found = {"true": tried(True), "warn": tried("warn"), "false": tried(False)}
    figures: Figures = {
        "equal": {value: same for value, (same, _) in found.items()},
        "step_seconds": {value: seconds for value, (_, seconds) in found.items()},
    }
    if not figures["equal"]["true"]:
        figures["wrong"] = (
            "two equal trainings with train.deterministic=true end with different bits"
        )
    return figures


class _Alone(DistributedAMPTrainer):
    """A trainer with the requested strategy, also for a single rank."""

    def _choose_strategy(self) -> Strategy:
        if self.parallel == "single":
            return Strategy()
        if self.parallel == "ddp":
            return DDPStrategy(self.distributed)
        return FSDPStrategy(self.distributed, self._fsdp, self.amp.dtype)


def world(_job: Job, device: torch.device) -> Figures:
    """Compare DDP and FSDP in a process group of one rank with a single process."""
    say("DDP and FSDP: ten small steps in a world of one")
    choose_kernels(True)
    size, rank = SIZES["tiny"], one_rank(device)
    data = batches(size, device, 4)

    def losses(parallel: Any) -> list[float]:
        trainer = _Alone(
            build(size, device, torch.float32),
            adamw,
            distributed=rank,
            parallel=parallel,
            amp=AMPConfig(dtype="fp32"),
            clip_norm=1.0,
            device=device,
        )
        trainer.wrap_model()
        steps = [trainer.training_step([data[step % 4]], next_byte) for step in range(10)]
        return [step.loss.item() for step in steps]

    with tempfile.TemporaryDirectory() as place:
        # A file instead of a port, because another program may use the port.
        dist.init_process_group(
            rank.backend,
            init_method=(Path(place) / "meeting").as_uri(),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=60),
        )
        try:
            plain = losses("single")
            furthest = {
                name: max(abs(a - b) for a, b in zip(losses(name), plain, strict=True))
                for name in ("ddp", "fsdp")
            }
        finally:
            dist.destroy_process_group()
    figures: Figures = {"backend": rank.backend, "furthest": furthest}
    # Not `>`, which is false for NaN.
    far = [name for name, distance in furthest.items() if not distance < 1e-4]
    if far:
        figures["wrong"] = f"{' and '.join(far)} with one rank differ from a single process"
    return figures


PARTS: dict[str, Callable[[Job, torch.device], Figures]] = {
    "parity": parity,
    "world": world,
    "repeat": repeat,
    "speed": speed,
    "deterministic": deterministic,
    "checkpoint": checkpoint,
}
