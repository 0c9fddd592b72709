"""Advice for a rank that ran out of memory, from numbers to lines."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpcrun.train.memory_advice import (
    OutOfMemory,
    Usage,
    advice,
    explaining,
    is_out_of_memory,
)

USAGE = Usage(
    batch_size=64,
    micro_batch=16,
    ranks=4,
    parallel="ddp",
    checkpointing="none",
    dtype="fp32",
    cpu_offload=False,
    cuda=True,
)


def told(**changes: object) -> str:
    return "\n".join(advice(Usage(**(vars(USAGE) | changes))))  # type: ignore[arg-type]


def test_the_micro_batch_is_halved_and_the_batch_kept() -> None:
    assert "train.micro_batch=8 takes 8 samples at once instead of 16, in 2 micro-batches" in told()
    assert "train.micro_batch=2 takes 2 samples at once instead of 3, in 8" in told(micro_batch=3)
    assert "train.micro_batch" not in told(micro_batch=1)


def test_only_what_is_not_done_yet_is_advised() -> None:
    everything = told()
    for key in ("amp.dtype=bf16", "train.activation_checkpointing=full", "train.parallel=fsdp"):
        assert key in everything
    done = told(dtype="bf16", checkpointing="full", parallel="fsdp")
    assert "bf16" not in done
    assert "checkpointing" not in done
    assert "fsdp.cpu_offload=true" in done
    assert "1/4 of weights" in everything


def test_one_sample_on_one_rank_with_everything_on_still_gets_advice() -> None:
    left = told(micro_batch=1, ranks=1, checkpointing="full", dtype="bf16", cuda=False)
    assert "more GPUs" in left


def test_a_model_that_does_not_fit_gets_no_advice_on_samples() -> None:
    (line,) = advice(replace(USAGE, micro_batch=0))
    assert "train.parallel=fsdp keeps 1/4" in line
    assert "the model does not fit: more GPUs" in told(micro_batch=0, parallel="fsdp")
    assert "the model does not fit: more GPUs" in told(micro_batch=0, ranks=1)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_lack_of_memory_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_real_refusal_of_the_allocator_is_explained(tmp_path: Path) -> None:
    with (
        pytest.raises(OutOfMemory, match=r"train\.micro_batch=8") as caught,
        explaining(USAGE, tmp_path, rank=0),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert Path(caught.traceback[-1].path) == Path(__file__)
    with pytest.raises(ValueError, match="another"), explaining(USAGE, tmp_path, rank=0):
        raise ValueError("another")
