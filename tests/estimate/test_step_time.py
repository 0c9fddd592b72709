"""The predicted time of a step follows arithmetic, memory and NCCL's cost model."""

import pytest

from hpcrun.config import override_layer, resolve
from hpcrun.estimate.network import DETERMINISTIC, Group, ddp, fsdp, seconds
from hpcrun.estimate.step_time import step_time


def test_a_ring_all_reduce_pays_for_each_hop():
    # 14 NVLink hops of 3.4 microseconds and a start of 8.4; the data passes each link 7/4 times at 360 GB/s.
    expected = 56e-6 + 1e9 * 14 / 8 / 360e9
    assert seconds("all_reduce", 1e9, Group(8, 8), DETERMINISTIC) == pytest.approx(expected)
    assert seconds("all_reduce", 1e9, Group(1, 1)) == 0
    # The review of a ring over 512 GPUs found 8 ms for any size above 2 MB, a tree at most 1 ms.
    ring = seconds("all_reduce", 4e6, Group(512, 8), DETERMINISTIC)
    assert 0.005 < ring < 0.012
    assert seconds("all_reduce", 4e6, Group(512, 8)) < 0.001


def test_hybrid_shards_communicate_less_on_many_nodes():
    group = Group(4096, 8)
    assert fsdp(1e9, 16, group, hybrid=True) < fsdp(1e9, 16, group, hybrid=False)
    assert fsdp(1e9, 16, Group(8, 8), hybrid=True) == fsdp(1e9, 16, Group(8, 8), hybrid=False)
    assert ddp(1e9, group, 200, DETERMINISTIC) < ddp(1e9, group, 25, DETERMINISTIC)


def time(*overrides, gpu="h100", parallel="ddp", **found):
    config = resolve([override_layer(["amp.dtype=bf16", *overrides])])
    known = {
        "parameters": 10**9,
        "layers": 16,
        "flops": 1.2e13,
        "micro_batch": 4,
        "accumulation": 2,
        "reduces_each": False,
    }
    return step_time(config, gpu, parallel=parallel, **known | found)


def test_the_time_of_one_gpu_is_arithmetic_and_optimizer():
    alone = time("train.compile=true")
    assert alone.computation == pytest.approx(8 * 1.2e13 / (0.47 * 989e12))
    assert alone.optimizer == pytest.approx(28e9 / 3.35e12)
    assert alone.communication == 0
    assert alone.mfu == pytest.approx(8 * 1.2e13 / alone.seconds / 989e12)
    recomputed = time("train.compile=true", "train.activation_checkpointing=full")
    assert recomputed.computation == pytest.approx(alone.computation * 4 / 3)


@pytest.mark.parametrize(
    ("overrides", "found", "reason"),
    [
        ([], {"gpu": ""}, "it is known for --gpu a100-40, a100-80, h100"),
        ([], {"gpu": "v100-32"}, "it is known for --gpu"),
        (["amp.dtype=fp32"], {}, "not for amp.dtype=fp32"),
        ([], {"flops": None}, "set the task's flops_per_sample"),
    ],
)
def test_an_unknown_time_has_a_reason(overrides, found, reason):
    assert reason in time(*overrides, **found)


SEVERAL = ("job.nodes=64", "job.gpus=8", "train.batch_size=4096")


def test_communication_counts_only_beyond_the_computation():
    large = time(*SEVERAL, parallel="fsdp", flops=1e14)
    assert large.exposed == 0
    assert large.seconds == pytest.approx(large.computation + large.optimizer)
    small = time(*SEVERAL, parallel="fsdp", flops=1e9)
    assert small.seconds == pytest.approx(small.communication + small.optimizer, rel=1e-3)
    free = time(*SEVERAL, "train.deterministic=false", parallel="fsdp", flops=1e9)
    assert free.communication < small.communication


def test_ddp_hides_all_reduces_in_the_last_backward_pass():
    once, often = (time(*SEVERAL, accumulation=count) for count in (1, 10))
    assert once.communication == often.communication > 0
    # Two of three parts of the only micro-batch, however many come before.
    hidden = once.computation * 2 / 3
    assert once.exposed == pytest.approx(once.communication - hidden)
    assert often.exposed == pytest.approx(once.exposed)
    again = time(*SEVERAL, "train.activation_checkpointing=full", accumulation=1)
    assert again.exposed == pytest.approx(once.communication - again.computation * 3 / 4)
    half = time(*SEVERAL, "train.compression=bf16", accumulation=1)
    assert half.communication < once.communication


def test_fsdp_gathers_in_each_pass_and_reduces_when_told():
    gather, reduce = (
        16 * seconds(kind, size * 10**9 / 16, Group(512, 8), DETERMINISTIC)
        for kind, size in (("all_gather", 2), ("reduce_scatter", 4))
    )

    def communication(*overrides, **found):
        return time(*SEVERAL, *overrides, parallel="fsdp", accumulation=5, **found).communication

    assert communication() == pytest.approx(10 * gather + reduce)
    assert communication(reduces_each=True) == pytest.approx(10 * gather + 5 * reduce)
    kept = communication("fsdp.reshard_after_forward=false")
    assert kept == pytest.approx(gather + reduce)
    assert communication("fsdp.reduce_dtype=bf16") < communication()
    # A forward pass as long as its communication: only the last pass, with the reduction, is too short.
    backward = 2 * gather
    tight = time(*SEVERAL, parallel="fsdp", accumulation=5, flops=gather * 3 * 0.43 * 989e12 / 4)
    assert tight.exposed == pytest.approx(max(0.0, gather + reduce - backward), abs=1e-9)
    assert tight.exposed > 0
