"""What of a config may change in a run that has begun."""

import pytest

from hpcrun.config import override_layer, resolve, training_differences

BEGUN = ["job.gpus=2", "train.batch_size=32"]


def refused(change, *both):
    old, new = (resolve([override_layer([*BEGUN, *both, *more])]) for more in ([], change.split()))
    return [line.partition(":")[0] for line in training_differences(old, new)]


@pytest.mark.parametrize(
    "change",
    [
        "train.micro_batch=4",
        "train.accumulation=2",
        "train.activation_checkpointing=every train.checkpoint_blocks=3",
        "train.parallel=fsdp fsdp.cpu_offload=true fsdp.wrap=size fsdp.min_parameters=9",
        "train.compile=true train.compile_mode=max-autotune",
        "data.workers=3 data.prefetch=5",
        "optim.fused=false train.deterministic=warn train.find_unused_parameters=true",
    ],
)
def test_how_the_sums_are_computed_may_change(change):
    assert refused(change) == []


@pytest.mark.parametrize(
    "change",
    [
        *(
            "train.batch_size=64",
            "train.lr=1.0",
            "amp.dtype=bf16",
            "train.compression=fp16",
            "seed=1",
        ),
        *("train.uneven=pad", "fsdp.param_dtype=bf16", "optim.weight_decay=0.3", "data.path=there"),
    ],
)
def test_what_is_summed_and_how_precisely_stays(change):
    assert refused(change) == [change.partition("=")[0]]


@pytest.mark.parametrize(
    ("begun", "change", "stands", "keys"),
    [
        ("train.steps=20 optim.schedule=constant", "train.steps=40", 19, []),
        ("train.steps=20 optim.schedule=constant", "train.steps=40", 20, ["train.steps"]),
        ("train.steps=20 optim.schedule=constant", "train.steps=40", None, ["train.steps"]),
        ("train.steps=20 optim.schedule=constant", "train.steps=9", 8, []),
        ("train.steps=20 optim.schedule=constant", "train.steps=9", 9, ["train.steps"]),
        ("train.steps=20 optim.schedule=wsd", "train.steps=40", 17, []),
        ("train.steps=20 optim.schedule=wsd", "train.steps=40", 18, ["train.steps"]),
        ("train.steps=40 optim.schedule=wsd", "train.steps=20", 18, ["train.steps"]),
        ("optim.schedule=constant", "optim.schedule=wsd optim.decay_steps=5", 9, []),
        ("optim.warmup_steps=9", "train.steps=40", 8, []),
        ("optim.warmup_steps=9", "train.steps=40", 9, ["train.steps"]),
        ("optim.warmup_steps=0", "train.steps=40", 0, []),
        ("optim.schedule=wsd", "optim.warmup_steps=5", 7, ["optim.warmup_steps"]),
    ],
)
def test_the_length_is_open_until_the_learning_rate_comes_down(begun, change, stands, keys):
    old, new = (resolve([override_layer([*begun.split(), *more])]) for more in ([], change.split()))
    assert [line.partition(":")[0] for line in training_differences(old, new, stands)] == keys


def test_powersgd_finds_its_errors_in_the_buckets_that_they_were_made_in():
    change = "train.micro_batch=4 train.parallel=ddp train.compile=true"
    assert refused(change, "train.compression=powersgd") == ["train.compile", "train.parallel"]
    assert refused("train.deterministic=warn", "train.compression=powersgd") == []
