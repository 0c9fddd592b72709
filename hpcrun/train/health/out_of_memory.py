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
from hpcrun.train.data.batching import accumulation_for
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
    """What decides, with ``config``, how much memory a step takes.

    ``micro_batch``: samples that a rank computes at a time; 0 before the first step, while the model moves
    to its device. ``parallel``: as resolved. ``recomputable``: activation checkpointing is possible.
    """

    config: Config
    micro_batch: int
    ranks: int
    parallel: str
    gpu: bool
    recomputable: bool = True


def advice(now: MemorySettings) -> Iterator[str]:
    """Yield advice, the cheapest first: each line names keys, their values, and their cost.

    Use all keys of a line together; the config rejects a part of them.
    """
    train = now.config.train
    if now.micro_batch:
        yield from _smaller_activations(now)
    if now.ranks > 1 and now.parallel != "fsdp":
        graphs = train.compile and train.compile_mode == "reduce-overhead"
        other, ours = " train.compile_mode=default" if graphs else "", only_ddp(now.config)
        without = f"; in a new run without {ours}, which needs ddp" if ours else ""
        yield (
            f"train.parallel=fsdp{other} keeps 1/{now.ranks} of weights, gradients and optimizer state "
            f"on each rank; {now.parallel} keeps all of them on each{without}"
        )
    if now.parallel == "fsdp" and not now.config.fsdp.cpu_offload and now.gpu:
        yield "fsdp.cpu_offload=true keeps weights and optimizer state on the CPU, but is much slower"
    if now.micro_batch <= 1 and (now.ranks == 1 or now.parallel == "fsdp"):
        small = "micro-batches cannot be smaller than one sample"
        least = small if now.micro_batch else "the model does not fit"
        yield f"{least}: use more GPUs with train.parallel=fsdp, or a smaller model"


def _smaller_activations(now: MemorySettings) -> Iterator[str]:
    train, size = now.config.train, now.config.train.batch_size
    # Between micro-batches FSDP holds the gradients of all parameters, unless it reduces them each time.
    each = "fsdp.reduce_each_micro_batch=true"
    holds = now.parallel == "fsdp" and now.config.fsdp.reduce_each_micro_batch is not True
    if holds and accumulation_for(size, now.ranks, now.micro_batch) > 1:
        yield f"{each} keeps no unsharded gradients between micro-batches; gradients are sent more often"
    if now.micro_batch > 1:
        half = (now.micro_batch + 1) // 2
        parts = accumulation_for(size, now.ranks, half)
        instead = " train.accumulation=1" if train.accumulation > 1 else ""
        instead += f" {each}" if holds else ""
        yield (
            f"train.micro_batch={half}{instead} computes {half} samples at a time instead of "
            f"{now.micro_batch}, in {parts} micro-batches per step; the batch stays {size}"
        )
    if now.config.amp.dtype in ("fp32", "tf32") and now.gpu:
        yield "amp.dtype=bf16 halves the activations, on GPUs since 2020; in a new run"
    if train.activation_checkpointing == "none" and now.recomputable:
        yield (
            "train.activation_checkpointing=full keeps only each block's input "
            "and recomputes the rest, which takes about a third longer"
        )
    elif train.activation_checkpointing in ("every", "selective") and now.recomputable:
        kept = train.activation_checkpointing
        yield f"train.activation_checkpointing=full keeps less than {kept}"


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
