"""Advice for running out of memory, with the numbers of this run."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch

from hpcrun.config import Config
from hpcrun.devices import vendor
from hpcrun.run.files import make_log_folder
from hpcrun.train.data.batching import Batching, accumulation_for
from hpcrun.train.parallel.choose import only_ddp

_HOW = (
    "repeat the command of this run with one of these and the same --name to resume from the last "
    'checkpoint; advice marked "in a new run" needs a new --name'
)
_CPU_WORDS = ("can't allocate memory", "DefaultCPUAllocator: not enough memory")


class OutOfMemory(RuntimeError):
    """Error of a rank that ran out of memory; the text gives advice."""


@dataclass(frozen=True)
class MemorySettings:
    """Settings that decide how much memory a step takes.

    ``micro_batch``: samples that a rank computes at a time; 0 before the first step, while the model moves
    to its device. ``accumulation``: as in the config. ``only_ddp``: a key that prevents sharding.
    ``reduces_each``: FSDP reduces gradients in every micro-batch, as the config says. ``recomputable``: the
    model can be trained with activation checkpointing.
    """

    batch_size: int
    micro_batch: int
    ranks: int
    parallel: str
    checkpointing: str
    dtype: str
    cpu_offload: bool
    gpu: bool
    accumulation: int = 1
    compression: str = "none"
    only_ddp: str | None = None
    compile_mode: str | None = None
    reduces_each: bool = False
    recomputable: bool = True


def usage(
    config: Config,
    batching: Batching | None,
    *,
    ranks: int,
    parallel: str,
    gpu: bool,
    recomputable: bool = True,
) -> MemorySettings:
    """Collect the settings.

    Args:
        batching: None before the first step.
        parallel: as resolved.
        recomputable: the model can be trained with activation checkpointing.
    """
    return MemorySettings(
        batch_size=config.train.batch_size,
        micro_batch=0 if batching is None else batching.micro_batch,
        ranks=ranks,
        parallel=parallel,
        checkpointing=config.train.activation_checkpointing,
        dtype=config.amp.dtype,
        cpu_offload=config.fsdp.cpu_offload,
        gpu=gpu,
        accumulation=config.train.accumulation,
        compression=config.train.compression,
        only_ddp=only_ddp(config),
        compile_mode=config.train.compile_mode if config.train.compile else None,
        reduces_each=config.fsdp.reduce_each_micro_batch is True,
        recomputable=recomputable,
    )


def advice(now: MemorySettings) -> Iterator[str]:
    """Yield advice, the cheapest first: each line names keys, their values, and their cost.

    Use all keys of a line together; the config rejects a part of them.
    """
    if now.micro_batch:
        yield from _smaller_activations(now)
    if now.ranks > 1 and now.parallel != "fsdp":
        other = " train.compile_mode=default" if now.compile_mode == "reduce-overhead" else ""
        without = f"; in a new run without {now.only_ddp}, which needs ddp" if now.only_ddp else ""
        yield (
            f"train.parallel=fsdp{other} keeps 1/{now.ranks} of weights, gradients and optimizer state "
            f"on each rank; {now.parallel} keeps all of them on each{without}"
        )
    if now.parallel == "fsdp" and not now.cpu_offload and now.gpu:
        yield "fsdp.cpu_offload=true keeps weights and optimizer state on the CPU, but is much slower"
    if now.micro_batch <= 1 and (now.ranks == 1 or now.parallel == "fsdp"):
        least = (
            "micro-batches cannot be smaller than one sample"
            if now.micro_batch
            else "the model does not fit"
        )
        yield f"{least}: use more GPUs with train.parallel=fsdp, or a smaller model"


def _smaller_activations(now: MemorySettings) -> Iterator[str]:
    # Between micro-batches FSDP holds the gradients of all parameters, unless it reduces them each time.
    each = "fsdp.reduce_each_micro_batch=true"
    holds = now.parallel == "fsdp" and not now.reduces_each
    if holds and accumulation_for(now.batch_size, now.ranks, now.micro_batch) > 1:
        yield f"{each} keeps no unsharded gradients between micro-batches; gradients are sent more often"
    if now.micro_batch > 1:
        half = (now.micro_batch + 1) // 2
        parts = accumulation_for(now.batch_size, now.ranks, half)
        instead = " train.accumulation=1" if now.accumulation > 1 else ""
        instead += f" {each}" if holds else ""
        yield (
            f"train.micro_batch={half}{instead} computes {half} samples at a time instead of "
            f"{now.micro_batch}, in {parts} micro-batches per step; the batch stays {now.batch_size}"
        )
    if now.dtype in ("fp32", "tf32") and now.gpu:
        yield "amp.dtype=bf16 halves the activations, on GPUs since 2020; in a new run"
    # PowerSGD keeps its error per bucket, and a resume needs the same buckets.
    where = "; in a new run" if now.compression == "powersgd" else ""
    if now.checkpointing == "none" and now.recomputable:
        yield (
            "train.activation_checkpointing=full keeps only each block's input "
            f"and recomputes the rest, which takes about a third longer{where}"
        )
    elif now.checkpointing in ("every", "selective") and now.recomputable:
        yield f"train.activation_checkpointing=full keeps less than {now.checkpointing}{where}"


def is_out_of_memory(error: BaseException) -> TypeGuard[Exception]:
    """Return True if ``error`` means that a device or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _CPU_WORDS)


@contextlib.contextmanager
def explaining(now: MemorySettings, folder: Path, rank: int) -> Iterator[None]:
    """Turn a lack of memory in the block into :class:`OutOfMemory` with advice."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Not chained: the new error has the same traceback, and its text contains the old one.
        raise explained(error, now, folder, rank) from None


def explained(error: Exception, now: MemorySettings, folder: Path, rank: int) -> OutOfMemory:
    """Return the error to raise instead of ``error``; writes the GPU allocator's state to ``folder``."""
    first, *_ = str(error).strip().splitlines() or [type(error).__name__]
    lines = [*advice(now), _HOW, *_snapshot(folder, rank)]
    return OutOfMemory("\n  ".join([first, *lines])).with_traceback(error.__traceback__)


def _snapshot(folder: Path, rank: int) -> Iterator[str]:
    """Write the allocator's state for https://pytorch.org/memory_viz, and its summary."""
    summary = folder / f"memory-rank-{rank:05d}.txt"

    def file() -> Path:
        make_log_folder(folder)
        return summary

    # The process may be too damaged for this; the error must be reported anyway.
    with contextlib.suppress(Exception):
        if vendor.write_memory_report(file):
            yield f"memory summary in {summary}; next to it a .pickle file for pytorch.org/memory_viz"
