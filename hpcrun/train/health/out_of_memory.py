"""Advice for running out of memory."""

import contextlib
from collections.abc import Iterator
from typing import TypeGuard

import torch

from hpcrun.config import Config

_HOW = (
    "repeat the command of this run with one of these and the same --name to resume from the last "
    'checkpoint; advice marked "in a new run" needs a new --name'
)
_CPU_WORDS = ("can't allocate memory", "DefaultCPUAllocator: not enough memory")


class OutOfMemory(RuntimeError):
    """Error of a rank that ran out of memory; the text gives advice."""


def advice(config: Config, parallel: str, ranks: int) -> Iterator[str]:
    """Yield what saves memory and is not in ``config`` (both as resolved), the cheapest first."""
    yield "a smaller train.micro_batch computes fewer samples at a time; the batch stays the same"
    if config.amp.dtype in ("fp32", "tf32"):
        yield "amp.dtype=bf16 halves the activations, on GPUs since 2020; in a new run"
    if config.train.activation_checkpointing != "full":
        yield (
            "train.activation_checkpointing=full keeps only each block's input "
            "and recomputes the rest, which takes about a third longer"
        )
    if parallel == "fsdp" and not config.fsdp.reshard_after_forward:
        yield "fsdp.reshard_after_forward=true frees gathered weights until the backward pass"
    if parallel == "fsdp" and config.fsdp.shard == "hybrid":
        yield f"fsdp.shard=full keeps 1/{ranks} of weights, gradients and optimizer state on each rank"
    if ranks > 1 and parallel != "fsdp":
        yield (
            f"train.parallel=fsdp keeps 1/{ranks} of weights, gradients and optimizer state "
            f"on each rank; {parallel} keeps all of them on each"
        )
    else:
        yield "more GPUs with train.parallel=fsdp, or a smaller model"


def is_out_of_memory(error: BaseException) -> TypeGuard[Exception]:
    """Return True if ``error`` means that a device or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _CPU_WORDS)


@contextlib.contextmanager
def explaining(config: Config, parallel: str, ranks: int) -> Iterator[None]:
    """Turn a lack of memory in the block into :class:`OutOfMemory` with advice."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        lines = [first, *advice(config, parallel, ranks), _HOW]
        # Not chained: the new error has the same traceback, and its text contains the old one.
        raise OutOfMemory("\n  ".join(lines)).with_traceback(error.__traceback__) from None
