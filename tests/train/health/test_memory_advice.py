"""Advice for a rank that ran out of memory."""

from pathlib import Path

import pytest
import torch

from hpcrun.config import override_layer, resolve
from hpcrun.train.health.out_of_memory import OutOfMemory, advice, explaining, is_out_of_memory


def advised(*settings: str, parallel: str = "ddp", ranks: int = 4) -> str:
    return "\n".join(advice(resolve([override_layer(list(settings))]), parallel, ranks))


def test_settings_already_in_use_are_not_advised() -> None:
    everything = advised()
    for key in ("amp.dtype=bf16", "train.activation_checkpointing=full", "train.parallel=fsdp"):
        assert key in everything
    assert "1/4 of weights" in everything
    done = advised("amp.dtype=bf16", "train.activation_checkpointing=full", parallel="fsdp")
    assert "bf16" not in done
    assert "checkpointing" not in done
    assert "more GPUs" in done
    assert "fsdp.shard=full" not in done
    keys = (
        "train.parallel=fsdp",
        "fsdp.reshard_after_forward=false",
        "job.nodes=2",
        "fsdp.shard=hybrid",
    )
    sharded = advised(*keys, parallel="fsdp")
    assert "fsdp.reshard_after_forward=true frees" in sharded
    assert "fsdp.shard=full keeps 1/4 of weights" in sharded


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
def test_lack_of_memory_is_distinguished_from_other_errors(
    error: Exception, expected: bool
) -> None:
    assert is_out_of_memory(error) is expected


def test_a_real_refusal_of_the_allocator_is_explained() -> None:
    with (
        pytest.raises(OutOfMemory, match=r"train\.micro_batch[^$]*same --name") as caught,
        explaining(resolve([]), "ddp", 4),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert Path(caught.traceback[-1].path) == Path(__file__)
    with (
        pytest.raises(ValueError, match="another"),
        explaining(resolve([]), "ddp", 4),
    ):
        raise ValueError("another")
