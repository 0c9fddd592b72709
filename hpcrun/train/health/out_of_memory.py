"""What to do when memory runs out, with the numbers of this run: for whoever reads the log at night."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from hpcrun.config import Config
from hpcrun.run.io.files import make_log_folder
from hpcrun.train.data.batching import Batching, accumulation_for
from hpcrun.train.parallel.choose import only_ddp

_HOW = (
    "the command of this run with it, and with the same --name, goes on from the last checkpoint; only what "
    "says so needs a new run"
)
_CPU_WORDS = ("can't allocate memory", "DefaultCPUAllocator: not enough memory")


class OutOfMemory(RuntimeError):
    """A rank ran out of memory; the text says what would need less."""


@dataclass(frozen=True)
class Usage:
    """What decides how much memory a step takes.

    ``micro_batch``: samples that a rank takes at once; 0 before the first step, while the model is put
    on its device. ``accumulation``: the config's own. ``only_ddp``: a key that keeps it from being sharded.
    """

    batch_size: int
    micro_batch: int
    ranks: int
    parallel: str
    checkpointing: str
    dtype: str
    cpu_offload: bool
    cuda: bool
    accumulation: int = 1
    compression: str = "none"
    only_ddp: str | None = None
    compile_mode: str | None = None


def usage(
    config: Config, batching: Batching | None, *, ranks: int, parallel: str, cuda: bool
) -> Usage:
    """The numbers of this run; ``batching``: None before the first step; ``parallel``: what it comes to."""
    return Usage(
        batch_size=config.train.batch_size,
        micro_batch=0 if batching is None else batching.micro_batch,
        ranks=ranks,
        parallel=parallel,
        checkpointing=config.train.activation_checkpointing,
        dtype=config.amp.dtype,
        cpu_offload=config.fsdp.cpu_offload,
        cuda=cuda,
        accumulation=config.train.accumulation,
        compression=config.train.compression,
        only_ddp=only_ddp(config),
        compile_mode=config.train.compile_mode if config.train.compile else None,
    )


def advice(now: Usage) -> Iterator[str]:
    """What to set, the cheapest first: each line names keys, their values, and what they cost.

    What stands in one line goes together: without the rest of it, the config would be refused.
    """
    if now.micro_batch:
        yield from _smaller_activations(now)
    if now.ranks > 1 and now.parallel != "fsdp":
        other = " train.compile_mode=default" if now.compile_mode == "reduce-overhead" else ""
        without = f"; in a new run without {now.only_ddp}, which needs ddp" if now.only_ddp else ""
        yield (
            f"train.parallel=fsdp{other} keeps 1/{now.ranks} of weights, gradients and optimiser state "
            f"on each rank, where {now.parallel} keeps all{without}"
        )
    if now.parallel == "fsdp" and not now.cpu_offload and now.cuda:
        yield "fsdp.cpu_offload=true keeps weights and optimiser on the CPU, and is much slower"
    if now.micro_batch <= 1 and (now.ranks == 1 or now.parallel == "fsdp"):
        least = "one sample at a time is the least" if now.micro_batch else "the model does not fit"
        yield f"{least}: more GPUs with train.parallel=fsdp, or a smaller model"


def _smaller_activations(now: Usage) -> Iterator[str]:
    if now.micro_batch > 1:
        half = (now.micro_batch + 1) // 2
        parts = accumulation_for(now.batch_size, now.ranks, half)
        instead = " train.accumulation=1" if now.accumulation > 1 else ""
        yield (
            f"train.micro_batch={half}{instead} takes {half} samples at once instead of {now.micro_batch}, "
            f"in {parts} micro-batches a step; the batch of {now.batch_size} stays what it is"
        )
    if now.dtype in ("fp32", "tf32") and now.cuda:
        yield "amp.dtype=bf16 halves the activations, on a GPU of 2020 or later; in a new run"
    # Its error feedback is kept by buckets, which a resume must find as they were.
    where = "; in a new run" if now.compression == "powersgd" else ""
    if now.checkpointing == "none":
        yield (
            "train.activation_checkpointing=full keeps only each block's input, "
            f"and computes the rest again, for about a third more time{where}"
        )
    elif now.checkpointing in ("every", "selective"):
        yield f"train.activation_checkpointing=full keeps less than {now.checkpointing}{where}"


def is_out_of_memory(error: BaseException) -> TypeGuard[Exception]:
    """Whether ``error`` says that a device, or the host, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _CPU_WORDS)


@contextlib.contextmanager
def explaining(now: Usage, folder: Path, rank: int) -> Iterator[None]:
    """Let a lack of memory in the block say what would need less; raises :class:`OutOfMemory`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # Without the error itself: its traceback is the same, and its words are in ours.
        raise explained(error, now, folder, rank) from None


def explained(error: Exception, now: Usage, folder: Path, rank: int) -> OutOfMemory:
    """The error to raise instead of ``error``; CUDA's books are written to ``folder``."""
    first, *_ = str(error).strip().splitlines() or [type(error).__name__]
    lines = [*advice(now), _HOW, *_snapshot(folder, rank)]
    return OutOfMemory("\n  ".join([first, *lines])).with_traceback(error.__traceback__)


def _snapshot(folder: Path, rank: int) -> Iterator[str]:
    """Write what the allocator holds, for https://pytorch.org/memory_viz, and its summary."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return
    # The process may be too far gone for this, and its end must be told all the same.
    with contextlib.suppress(Exception):
        make_log_folder(folder)
        summary = folder / f"memory-rank-{rank:05d}.txt"
        summary.write_text(cuda.memory_summary())
        cuda.memory._dump_snapshot(str(summary.with_suffix(".pickle")))
        yield f"what held the memory is in {summary}, and beside it in a snapshot for pytorch.org/memory_viz"
