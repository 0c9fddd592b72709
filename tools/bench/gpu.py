#!/usr/bin/env python3
"""What one GPU does with hpcrun's trainer: throughput, MFU, memory, what a checkpoint costs, and parity.

Trains byte-level GPTs of about 1 and 7 billion parameters (bf16, torch.compile, fused AdamW) on random
bytes for a few steps. Weights are kept in fp32 where the arithmetic says that they fit with their
gradients and Adam's moments, and in bf16 otherwise; the table says which. Then it measures the stall of
an asynchronous checkpoint of the smaller model's state, compares fp16 loss scaling with torch's own
loop bit by bit, and takes a step with DDP and with FSDP in an NCCL world of one. Needs this checkout and the
libraries that training with it imports: torch, numpy, pydantic, PyYAML, psutil, xxhash.

    tools/bench/gpu.py                                   # about five minutes on an H100 or H200
    tools/bench/gpu.py --sizes 1b --dir /scratch/bench   # where the checkpoint goes
    tools/bench/gpu.py --sizes tiny --device cpu         # the same path on a machine without a GPU
"""

import argparse
import copy
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.config import AMPConfig
from hpcrun.tasks.gpt import GPT
from hpcrun.tasks.options import LanguageModelShape
from hpcrun.train.flops import peak_here
from hpcrun.train.preparation import Preparation
from hpcrun.train.trainer import AMPTrainer, DistributedAMPTrainer

BYTES_FP32, BYTES_BF16 = 16, 8
"""A parameter with its gradient and Adam's two moments, in bytes."""


@dataclass(frozen=True)
class Size:
    """A model and its batch: samples of ``context`` bytes that a step takes at once."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    recompute: bool

    @property
    def parameters(self) -> int:
        """Weights of the blocks and the embedding; norms left out."""
        return 12 * self.layers * self.width**2 + 256 * self.width

    @property
    def flops_per_token(self) -> float:
        """Six a parameter, and the attention's products (Chowdhery et al. 2022, PaLM, appendix B)."""
        return 6 * self.parameters + 12 * self.layers * self.width * self.context


SIZES = {
    "tiny": Size(2, 64, 4, 64, 4, recompute=False),
    "1b": Size(20, 2048, 16, 2048, 8, recompute=False),
    "7b": Size(34, 4096, 32, 2048, 4, recompute=True),
}


@dataclass(frozen=True)
class Speed:
    """What a size reaches: medians over the timed steps."""

    parameters: int
    weights: str
    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    peak_gigabytes: float | None
    first_step_seconds: float


def build(size: Size, device: torch.device, dtype: torch.dtype) -> GPT:
    """The model with random weights, made on the device: on the host 7 billion take minutes."""
    shape = LanguageModelShape(
        layers=size.layers, width=size.width, heads=size.heads, context=size.context
    )
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = _without_initialising(shape)
    model = model.to(dtype).to_empty(device=device)
    made = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim < 2:
                weight.fill_(1.0)
            else:
                weight.normal_(std=0.02 / math.sqrt(2 * size.layers), generator=made)
    return model


def _without_initialising(shape: LanguageModelShape) -> GPT:
    class Hollow(GPT):
        def _initialise(self, layers: int, generator: torch.Generator) -> None:
            """Meta tensors have no values."""

    return Hollow(shape)


def next_byte(model: nn.Module, batch: Tensor) -> Tensor:
    """The language model's loss."""
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)


def batches(size: Size, device: torch.device, count: int) -> list[Tensor]:
    made = torch.Generator(device).manual_seed(1)
    shape = (size.batch, size.context + 1)
    return [torch.randint(0, 256, shape, device=device, generator=made) for _ in range(count)]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def one_rank() -> DistributedConfig:
    return DistributedConfig(world_size=1, rank=0, local_rank=0)


def trainer_for(size: Size, device: torch.device, *, compiled: bool) -> tuple[AMPTrainer, str]:
    """The trainer, and the precision in which its weights are kept."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**40
    # A quarter of the device is left to activations.
    dtype = torch.float32 if size.parameters * BYTES_FP32 < 0.8 * free else torch.bfloat16
    if size.parameters * BYTES_BF16 > 0.9 * free:
        need = size.parameters * BYTES_BF16 / 1e9
        raise SystemExit(
            f"gpu: {need:.0f} GB of state do not fit {free / 1e9:.0f} GB; leave that size out"
        )
    trainer = DistributedAMPTrainer(
        build(size, device, dtype),
        adamw,
        distributed=one_rank(),
        parallel="single",
        amp=AMPConfig(dtype="bf16"),
        clip_norm=1.0,
        device=device,
        preparation=Preparation(
            checkpointing="full" if size.recompute else "none",
            compile="default" if compiled else None,
        ),
    )
    trainer.wrap_model()
    return trainer, "fp32" if dtype == torch.float32 else "bf16"


def speed(size: Size, device: torch.device, steps: int, *, compiled: bool) -> Speed:
    """Train ``steps`` steps after three that warm up."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trainer, weights = trainer_for(size, device, compiled=compiled)
    data = batches(size, device, 4)
    seconds = []
    for step in range(steps + 3):
        wait(device)
        began = time.perf_counter()
        trainer.training_step([data[step % len(data)]], next_byte)
        wait(device)
        seconds.append(time.perf_counter() - began)
    typical = statistics.median(seconds[3:])
    tokens = size.batch * size.context / typical
    peak = peak_here(device, "bf16", None)
    return Speed(
        parameters=sum(parameter.numel() for parameter in trainer.module.parameters()),
        weights=weights,
        step_seconds=typical,
        tokens_per_second=tokens,
        mfu=None if peak is None else tokens * size.flops_per_token / peak,
        peak_gigabytes=(
            torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
        ),
        first_step_seconds=seconds[0],
    )


def stall(size: Size, device: torch.device, folder: Path, *, compiled: bool) -> dict[str, float]:
    """What a checkpoint of a training's whole state takes from it, with the second save's buffers warm."""
    trainer, _ = trainer_for(size, device, compiled=compiled)
    data = batches(size, device, 2)

    def some_steps(count: int) -> float:
        wait(device)
        began = time.perf_counter()
        for step in range(count):
            trainer.training_step([data[step % 2]], next_byte)
        wait(device)
        return time.perf_counter() - began

    some_steps(3)
    count = 20
    plain = some_steps(count)
    told: dict[str, float] = {}
    engine = trainer._engine(folder)
    for number in (1, 2):
        began = time.perf_counter()
        trainer.start_checkpoint(engine, number)
        called = time.perf_counter() - began
        outcomes = engine.poll()
        while not outcomes:
            some_steps(1)
            outcomes = engine.poll()
        busy = time.perf_counter() - began
        outcome = outcomes[-1]
        if not outcome.ok:
            raise SystemExit(f"gpu: the checkpoint was not written: {outcome.error}")
        told = {
            "gigabytes": outcome.bytes / 1e9,
            "call_seconds": called,
            "stalled_seconds": outcome.stalled,
            "until_committed_seconds": busy,
            "step_seconds_without": plain / count,
        }
    wait(device)
    state = list(trainer.module.parameters())
    host = [torch.empty_like(p, device="cpu", pin_memory=device.type == "cuda") for p in state]
    began = time.perf_counter()
    for target, source in zip(host, state, strict=True):
        target.copy_(source.detach(), non_blocking=True)
    wait(device)
    told["copy_of_the_weights_seconds"] = time.perf_counter() - began
    return told


def scaler_parity(device: torch.device) -> bool:
    """Whether fp16 training gives the bits of torch's own loop: losses, weights and scale after 50 steps."""
    size = SIZES["tiny"]
    first = build(size, device, torch.float32)
    second = copy.deepcopy(first)
    data = batches(size, device, 4)
    amp = AMPConfig(dtype="fp16", init_scale=2.0**20, growth_interval=5)
    trainer = AMPTrainer(first, adamw, amp=amp, clip_norm=1.0, device=device)
    optimizer = adamw(second)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**20, growth_interval=5)
    for step in range(50):
        batch = data[step % len(data)]
        ours = trainer.training_step([batch], next_byte)
        with torch.autocast(device.type, dtype=torch.float16):
            theirs = next_byte(second, batch)
        scaler.scale(theirs).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(second.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if not torch.equal(ours.loss, theirs.detach()):
            return False
    trainer.gate.settle()
    return trainer.scaler.get_scale() == scaler.get_scale() and all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def world_of_one(device: torch.device) -> dict[str, bool]:
    """Whether DDP and FSDP in a process group of one rank learn what a single process does."""
    size = SIZES["tiny"]
    backend = "nccl" if device.type == "cuda" else "gloo"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group(backend, rank=0, world_size=1)
    try:
        data = batches(size, device, 4)

        def losses(wrap: Callable[[nn.Module], nn.Module]) -> list[float]:
            model = wrap(build(size, device, torch.float32))
            optimizer = adamw(model)
            found = []
            for step in range(10):
                loss = next_byte(model, data[step % 4])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            return found

        def shard(model: nn.Module) -> nn.Module:
            from torch.distributed.fsdp import fully_shard

            for block in model.blocks:  # type: ignore[union-attr]
                fully_shard(block)
            return fully_shard(model)

        plain = losses(lambda model: model)
        both: dict[str, Callable[[nn.Module], nn.Module]] = {
            "ddp": nn.parallel.DistributedDataParallel,
            "fsdp": shard,
        }
        return {
            name: all(abs(a - b) < 1e-4 for a, b in zip(losses(wrap), plain, strict=True))
            for name, wrap in both.items()
        }
    finally:
        dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1b,7b", help="of 1b, 7b and tiny (default 1b,7b)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps a size (default 20)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 …, or cpu (default cuda)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--dir", type=Path, help="folder for the checkpoint (default: a temporary one)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    wanted = parser.parse_args()
    sizes = wanted.sizes.split(",")
    if unknown := [name for name in sizes if name not in SIZES]:
        parser.error(f"--sizes: there is no {unknown[0]}; choose of {', '.join(SIZES)}")
    device = torch.device(wanted.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device: torch sees no GPU here; --sizes tiny --device cpu tries the path")
    compiled = not wanted.no_compile
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    results: dict[str, Any] = {"device": name, "torch": torch.__version__, "speed": {}}
    for size in sizes:
        results["speed"][size] = asdict(speed(SIZES[size], device, wanted.steps, compiled=compiled))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    folder = Path(tempfile.mkdtemp(dir=wanted.dir))
    try:
        results["checkpoint"] = stall(SIZES[sizes[0]], device, folder, compiled=compiled)
    finally:
        shutil.rmtree(folder)
    results["fp16_parity"] = scaler_parity(device)
    results["world_of_one"] = world_of_one(device)
    print(json.dumps(results, indent=2) if wanted.json else table(results))
    return 0


def table(results: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [
        f"{results['device']}, torch {results['torch']}",
        "",
        "| parameters | weights | step | tokens/s | MFU | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["speed"].values():
        mfu = "unknown device" if row["mfu"] is None else f"{row['mfu']:.1%}"
        peak = "" if row["peak_gigabytes"] is None else f"{row['peak_gigabytes']:.1f} GB"
        lines.append(
            f"| {row['parameters'] / 1e9:.3f} B | {row['weights']} | {1000 * row['step_seconds']:.1f} ms "
            f"| {row['tokens_per_second']:,.0f} | {mfu} | {peak} |"
        )
    saved = results["checkpoint"]
    lines += [
        "",
        f"checkpoint of {saved['gigabytes']:.2f} GB: training stopped for {saved['stalled_seconds']:.3f} s, "
        f"committed after {saved['until_committed_seconds']:.2f} s of further steps; "
        f"copying the weights alone takes {saved['copy_of_the_weights_seconds']:.3f} s",
        f"fp16 loss scaling equals torch's own loop, bit by bit: {results['fp16_parity']}",
        f"a world of one learns what a single process does: {results['world_of_one']}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
