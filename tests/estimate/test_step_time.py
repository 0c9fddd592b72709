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
    assert time(gpu="unknown") is None
    assert time("amp.dtype=fp32") is None


def test_communication_counts_only_beyond_the_computation():
    several = ("job.nodes=64", "job.gpus=8", "train.batch_size=4096")
    large = time(*several, parallel="fsdp", flops=1e14)
    assert large.seconds == pytest.approx(large.computation + large.optimizer)
    small = time(*several, parallel="fsdp", flops=1e9)
    assert small.seconds == pytest.approx(small.communication + small.optimizer)
    free = time(*several, "train.deterministic=false", parallel="fsdp", flops=1e9)
    assert free.communication < small.communication
