"""The predicted time of a step follows arithmetic, memory and NCCL's cost model."""

import pytest

from hpcrun.config import override_layer, resolve
from hpcrun.estimate.step_time import step_time, why_lower_bound
from hpcrun.train.parallel.network import DETERMINISTIC, Group, ddp, fsdp, fsdp_step, seconds


def test_a_ring_all_reduce_pays_for_each_hop():
    # 14 NVLink hops of 3.4 microseconds and a start of 8.4; the data passes each link 7/4 times at 360 GB/s.
    expected = 56e-6 + 1e9 * 14 / 8 / 360e9
    assert seconds("all_reduce", 1e9, Group(8, 8), DETERMINISTIC) == pytest.approx(expected)
    assert seconds("all_reduce", 1e9, Group(1, 1)) == 0


# Microseconds of the ring over 64 nodes: 126 hops over the network, 896 inside nodes, the start.
@pytest.mark.parametrize(("gpu", "hop"), [("h100", 3.4), ("a100-80", 6.0)])
def test_a_hop_inside_a_node_depends_on_the_processor(gpu, hop):
    latency = 126 * 14 + 896 * hop + 8.4
    speed = {"h100": 360e9, "a100-80": 200e9}[gpu]
    small = seconds("all_reduce", 32e3, Group(512, 8, gpu), DETERMINISTIC)
    assert small == pytest.approx(latency * 1e-6 + 32e3 * 1022 / 512 / speed)
    # From 1 kB per rank each hop takes 1.4 times as long.
    large = seconds("all_reduce", 1e9, Group(512, 8, gpu), DETERMINISTIC)
    assert large == pytest.approx(1.4 * latency * 1e-6 + 1e9 * 1022 / 512 / speed)


def test_trees_reach_half_of_their_bandwidth_at_middle_sizes():
    tree, group = [("tree", "Simple")], Group(512, 8)
    latency = (2 * (7 * 4.0 + 6 * 14.0) + 8.4) * 1e-6
    speed = 0.92 * 360e9 / 2
    for size, part in ((64, 0.9), (2**18, 0.5), (2**26, 0.8), (2**40, 1.0)):
        assert seconds("all_reduce", size, group, tree) == pytest.approx(
            latency + size / (part * speed)
        )


def test_one_rank_per_node_pays_the_whole_network_latency():
    # 14 hops with the latency of a tree in LL128.
    found = seconds("all_reduce", 64, Group(8, 1), [("ring", "LL128")])
    assert found == pytest.approx(14 * 8.5e-6 + 14e-6, rel=1e-3)


def test_hybrid_shards_communicate_less_on_many_nodes():
    group = Group(4096, 8)
    assert sum(fsdp(1e9, 16, group, hybrid=True)) < sum(fsdp(1e9, 16, group, hybrid=False))
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


@pytest.mark.parametrize(
    ("parameters", "tokens", "gpu", "reason"),
    [
        (124e6, 12 * 1024, "a100-40", "short: MPT with 125 million reached 45 %"),
        (8e6, 64 * 1024, "h100", "short: MPT"),
        (8e9, 16 * 1024, "h100", None),
        (1.3e9, 14 * 2048, "a100-80", None),
        # A batch of so few tokens reads the weights more than it computes.
        (8e9, 128, "h100", "the micro-batch is small"),
        (1.3e9, 256, "b200", "the micro-batch is small"),
    ],
)
def test_a_time_far_from_practice_is_a_lower_bound(parameters, tokens, gpu, reason):
    found = time("train.compile=true", gpu=gpu, parameters=int(parameters), accumulation=1,
                 flops=6 * parameters * tokens, micro_batch=1)  # fmt: skip
    told = why_lower_bound(found, gpu, int(parameters), 1)
    assert (told is None) == (reason is None)
    assert (reason or "") in (told or "")


SEVERAL = ("job.nodes=64", "job.gpus=8", "train.batch_size=4096")


def test_communication_counts_only_beyond_the_computation():
    large = time(*SEVERAL, parallel="fsdp", flops=1e14)
    assert large.exposed == 0
    assert large.seconds == pytest.approx(large.computation + large.optimizer)
    small = time(*SEVERAL, parallel="fsdp", flops=1e9)
    assert small.seconds == pytest.approx(small.communication + small.optimizer, rel=1e-3)
    free = time(*SEVERAL, "train.deterministic=false", parallel="fsdp", flops=1e9)
    assert free.communication < small.communication


def test_the_communication_of_fsdp_follows_its_options():
    group, gathered = Group(8, 8), 16 * seconds("all_gather", 2e9 / 16, Group(8, 8), DETERMINISTIC)
    reduced = 16 * seconds("reduce_scatter", 4e9 / 16, group, DETERMINISTIC)

    def spent(*overrides, parameters=10**9, accumulation=2):
        keys = ["amp.dtype=bf16", "train.parallel=fsdp", "job.gpus=8", *overrides]
        config = resolve([override_layer(keys)])
        return fsdp_step(config, parameters, 16, group, accumulation, hybrid=False)

    keep, once = "fsdp.reshard_after_forward=false", "fsdp.reduce_each_micro_batch=false"
    # 4 GB of gradients are reduced in each of two micro-batches.
    assert spent() == pytest.approx(4 * gathered + 2 * reduced)
    assert spent(keep) == pytest.approx(gathered + 2 * reduced)
    assert spent(once) == pytest.approx(4 * gathered + reduced)
    assert spent(keep, once) == pytest.approx(gathered + reduced)
    few = spent(parameters=4 * 10**8)
    gathered, reduced = fsdp(4e8, 16, group, DETERMINISTIC, hybrid=False)
    assert few == pytest.approx(4 * gathered + reduced)
    full = spent(once, "fsdp.param_dtype=fp32", "fsdp.reduce_dtype=bf16", accumulation=1)
    gathered, reduced = fsdp(1e9, 16, group, DETERMINISTIC, hybrid=False, weight=4, gradient=2)
    assert full == pytest.approx(2 * gathered + reduced)


def test_ddp_hides_all_reduces_in_the_last_backward_pass():
    small = (*SEVERAL, "train.bucket_mb=25")
    once, often = (time(*small, accumulation=count) for count in (1, 10))
    assert once.communication == often.communication > 0
    # Two of three parts of the only micro-batch, however many come before.
    hidden = once.computation * 2 / 3
    assert once.exposed == pytest.approx(once.communication - hidden)
    assert often.exposed == pytest.approx(once.exposed)
    again = time(*small, "train.activation_checkpointing=full", accumulation=1)
    assert again.exposed == pytest.approx(once.communication - again.computation * 3 / 4)


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
