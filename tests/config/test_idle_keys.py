"""Keys without effect are reported with the key that disables them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.config import (
    Config,
    file_layer,
    idle_lines,
    override_layer,
    resolve,
)

CONFIGS = Path(__file__).parents[2] / "configs"

# A key without effect, the key that disables it, and a value with which it has an effect.
IDLE = [
    ("train.compile_mode=max-autotune", "train.compile=false", "train.compile=true"),
    ("optim.momentum=0.5", "optim.name=adamw", "optim.name=sgd"),
    ("optim.decay_steps=9", "optim.schedule=cosine", "optim.schedule=wsd"),
    ("amp.init_scale=64", "amp.dtype=fp32", "amp.dtype=fp16"),
    ("train.lr_base_batch=8", "train.lr_scaling=none", "train.lr_scaling=sqrt"),
    ("train.powersgd_rank=2", "train.comm_hook=fp16", "train.comm_hook=powersgd"),
    ("fsdp.min_parameters=500", "fsdp.wrap=blocks", "fsdp.wrap=size"),
    ("train.profile=2000-2001", "train.steps=1000", "train.steps=3000"),
    # Disabled by a value other than the default.
    ("train.broadcast_buffers=false", "train.parallel=fsdp", "train.parallel=auto"),
    ("train.gradient_as_bucket_view=false", "train.parallel=single", "train.parallel=ddp"),
    ("train.bucket_mb=50", "train.parallel=fsdp", "train.parallel=ddp"),
    ("train.find_unused_parameters=true", "train.parallel=single", "train.parallel=ddp"),
    ("train.hang_start=60", "train.hang_after=null", "train.hang_after=30"),
    ("train.connect_timeout=60", "train.hang_after=null", "train.hang_after=30"),
    ("fsdp.cpu_offload=true", "train.parallel=ddp", "train.parallel=auto"),
    ("optim.betas=[0.8, 0.9]", "optim.name=sgd", "optim.name=adam"),
    ("optim.final_lr_fraction=0.5", "optim.schedule=constant", "optim.schedule=linear"),
    ("data.prefetch=4", "data.workers=0", "data.workers=1"),
    ("checkpoint.minutes=5", "checkpoint.auto=true", "checkpoint.auto=false"),
    ("checkpoint.memory_every=5", "restarts.in_place=false", "restarts.in_place=true"),
    ("checkpoint.memory_copies=1", "restarts.in_place=false", "restarts.in_place=true"),
    ("checkpoint.memory_copies=1", "checkpoint.memory_every=0", "checkpoint.memory_every=5"),
]
# Further keys that some of these need.
ALSO = ["train.validate_every=5"]


def resolved(*overrides: str) -> tuple[Config, list[str]]:
    layers = [override_layer([*ALSO, *overrides])]
    config = resolve(layers)
    return config, idle_lines(config, layers)


@pytest.mark.parametrize(("key", "because", "enough"), IDLE)
def test_with_both_keys_the_run_starts_with_a_line(key: str, because: str, enough: str) -> None:
    _, lines = resolved(key, because)
    assert [line.split(": ")[:2] for line in lines] == [["command line", key.partition("=")[0]]]
    assert because in lines[0]
    assert resolved(key, enough)[1] == []


def test_an_explicit_default_is_not_reported() -> None:
    assert resolved("amp.init_scale=65536", "optim.momentum=0.9")[1] == []


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_shipped_configs_have_no_key_without_effect(file: Path) -> None:
    layers = [file_layer(file)]
    assert idle_lines(resolve(layers), layers) == []


def test_a_command_may_use_any_key() -> None:
    layers = [override_layer(["command=[python, train.py]", "amp.init_scale=64"])]
    assert idle_lines(resolve(layers), layers) == []
