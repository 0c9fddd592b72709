"""Advice for a rank that ran out of memory."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcrun.config import override_layer, resolve, training_differences
from hpcrun.errors import UserError
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.run.directory import create
from hpcrun.run.events import Attempt
from hpcrun.train.data.batching import Batching, accumulation_of
from hpcrun.train.health.out_of_memory import (
    MemorySettings,
    OutOfMemory,
    advice,
    explaining,
    is_out_of_memory,
)
from hpcrun.train.model.prepare import Preparation, prepare
from hpcrun.train.position import Position
from hpcrun.train.setup import Context


def used(
    *settings: str, micro_batch: int = 16, ranks: int = 4, parallel: str = "ddp", gpu: bool = True
) -> MemorySettings:
    config = resolve([override_layer(["train.batch_size=64", *settings])])
    return MemorySettings(config, micro_batch, ranks, parallel, gpu)


def told(*settings: str, **changes: Any) -> str:
    return "\n".join(advice(used(*settings, **changes)))


def test_the_micro_batch_is_halved_and_the_batch_kept() -> None:
    assert (
        "train.micro_batch=8 computes 8 samples at a time instead of 16, in 2 micro-batches"
        in told()
    )
    assert "train.micro_batch=2 computes 2 samples at a time instead of 3, in 8" in told(
        micro_batch=3
    )
    assert "train.micro_batch" not in told(micro_batch=1)


def test_settings_already_in_use_are_not_advised() -> None:
    everything = told()
    for key in ("amp.dtype=bf16", "train.activation_checkpointing=full", "train.parallel=fsdp"):
        assert key in everything
    full = "train.activation_checkpointing=full"
    done = told("amp.dtype=bf16", full, parallel="fsdp")
    assert "bf16" not in done
    assert "checkpointing" not in done
    assert "fsdp.cpu_offload=true" in done
    assert "1/4 of weights" in everything


def test_micro_batches_with_fsdp_come_without_unsharded_gradients() -> None:
    each = "fsdp.reduce_each_micro_batch=true"
    first, *_ = advice(used(parallel="fsdp"))
    assert first.startswith(f"train.micro_batch=8 {each} computes 8 samples")
    first, *_ = advice(used(parallel="fsdp", micro_batch=8))
    assert first.startswith(f"{each} keeps no unsharded gradients")
    assert each not in told(each, "train.parallel=fsdp", parallel="fsdp", micro_batch=8)
    assert each not in told()


@pytest.mark.parametrize(
    "settings",
    [
        ["train.accumulation=2"],
        ["train.micro_batch=8"],
        ["train.compile=true", "train.compile_mode=reduce-overhead"],
    ],
)
def test_a_run_can_resume_with_the_advised_settings(settings: list[str]) -> None:
    begun = ["job.gpus=2", "train.batch_size=32", *settings]
    config = resolve([override_layer(begun)])
    batching = Batching(32, 2, accumulation_of(config, 2))
    now = MemorySettings(config, batching.micro_batch, 2, "ddp", gpu=True)
    followed = set()
    for line in advice(now):
        keys = [word for word in line.split() if re.fullmatch(r"[a-z]+\.\w+=\w+", word)]
        new = {word.partition("=")[0] for word in keys}
        kept = [setting for setting in begun if setting.partition("=")[0] not in new]
        changed = resolve([override_layer([*kept, *keys])])
        assert (not training_differences(config, changed)) == ("new run" not in line)
        followed |= new
    assert {"train.micro_batch", "train.activation_checkpointing", "train.parallel"} <= followed


def test_a_model_that_does_not_fit_gets_no_sample_advice() -> None:
    (line,) = advice(used(micro_batch=0))
    assert "train.parallel=fsdp keeps 1/4" in line
    assert "the model does not fit: use more GPUs" in told(micro_batch=0, parallel="fsdp")
    assert "the model does not fit: use more GPUs" in told(micro_batch=0, ranks=1)


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


def test_a_real_refusal_of_the_allocator_is_explained(tmp_path: Path) -> None:
    with (
        pytest.raises(OutOfMemory, match=r"train\.micro_batch=8[^$]*same --name") as caught,
        explaining(used(), tmp_path, rank=0),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert Path(caught.traceback[-1].path) == Path(__file__)
    with pytest.raises(ValueError, match="another"), explaining(used(), tmp_path, rank=0):
        raise ValueError("another")


class Normed(nn.Module):
    """Two blocks with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)
        )


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Normed(), False),
        (nn.ModuleList(nn.Linear(3, 3) for _ in range(2)), True),
        (nn.Linear(3, 3), False),
    ],
    ids=["statistics", "no statistics", "no blocks"],
)
def test_recomputation_is_not_advised_to_a_model_that_refuses_it(
    tmp_path: Path, model: nn.Module, named: bool
) -> None:
    config = resolve([])
    run, attempt = create(tmp_path / "a", "x", {}), Attempt("7", 0)
    context = Context(run, attempt, config, DistributedConfig(), None, Position().at)
    batching = Batching(64, 1, 1)
    with (
        pytest.raises(OutOfMemory) as raised,
        context.explain_memory(batching, "single", torch.device("cpu"), model),
    ):
        raise MemoryError
    assert ("train.activation_checkpointing" in str(raised.value)) is named
    wanted = Preparation("full")
    if named:
        prepare(model, wanted)
        return
    with pytest.raises(UserError, match=r"^train\.activation_checkpointing: "):
        prepare(model, wanted)
