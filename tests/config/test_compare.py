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


def test_powersgd_finds_its_errors_in_the_buckets_that_they_were_made_in():
    change = "train.micro_batch=4 train.parallel=ddp train.compile=true"
    assert refused(change, "train.compression=powersgd") == ["train.compile", "train.parallel"]
