"""The check of NCCL's rules finds planted faults; the rank programs of this folder run under it."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpcrun.ranks.tree_group import new_control_group
from hpcrun.train.parallel import process_group
from hpcrun.train.parallel.choose import least_of_ranks
from hpcrun.train.parallel.strategies import copy_from_rank_zero
from tests.support.on_ranks import forked
from tests.support.training.forks import fork_ranks
from tests.support.training.nccl_rules import BreaksNCCL, nccl_rules, require_same_order


@pytest.fixture
def rules():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with nccl_rules() as rules:
            yield rules
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.zeros(2, 3).T, "contiguous tensors, not the strides"),
        (torch.zeros(3, dtype=torch.int16), "knows no torch.int16"),
        (torch.zeros(3, dtype=torch.uint16), "knows no torch.uint16"),
        (torch.zeros(1).expand(3), "contiguous tensors, not the strides"),
    ],
)
def test_a_tensor_that_nccl_refuses_is_found(value, told):
    with pytest.raises(BreaksNCCL, match=told):
        dist.broadcast(value, src=0)


@pytest.mark.usefixtures("rules")
def test_a_decision_on_the_group_of_the_gradients_is_found():
    with pytest.raises(BreaksNCCL, match=r"train/parallel/choose\.py:least_of_ranks"):
        least_of_ranks(1, None)


def test_control_groups_are_exempt(rules):
    group = new_control_group()
    dist.broadcast(torch.zeros(4)[::2], src=0, group=group)
    assert least_of_ranks(1, group) == 1
    assert rules.calls == {}


def test_the_first_collective_connects_the_group_of_the_gradients(rules):
    process_group.connect(torch.device("cpu"))
    assert rules.calls == {"0": ["allreduce_ [[1]] ['torch.float32']"]}


def test_collectives_that_c_code_of_ddp_starts_are_seen(rules):
    DistributedDataParallel(torch.nn.Linear(2, 3))
    (calls,) = rules.calls.values()
    assert calls[-1] == "broadcast_ [[9]] ['torch.float32']"  # All weights, flattened.


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize(
    "value",
    [
        torch.randn(2, 3).T,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(4, dtype=torch.int16),
        torch.tensor([1, 2, 3], dtype=torch.uint16)[::2],
        torch.tensor(True),
        torch.tensor(2.5),
        torch.randn(3, dtype=torch.complex64),
        torch.zeros(0),
    ],
)
def test_any_tensor_is_copied_from_rank_zero_within_the_rules(value):
    before, strides = value.clone(), value.stride()
    copy_from_rank_zero(value)
    assert torch.equal(value, before)
    assert value.stride() == strides


def test_ranks_with_different_collectives_are_found():
    same = {"0": ["allreduce_ [[4]] ['torch.float32']"]}
    require_same_order([same, same, {"1": ["barrier [[1]] []"]}])
    with pytest.raises(
        BreaksNCCL,
        match=r"collective 0: rank 0: allreduce_ \[\[4\]\].*rank 1: allreduce_ \[\[5\]\]",
    ):
        require_same_order([same, {"0": ["allreduce_ [[5]] ['torch.float32']"]}])
    with pytest.raises(BreaksNCCL, match="collective 1: rank 0: None; rank 1: barrier"):
        require_same_order([same, {"0": [*same["0"], "barrier"]}])


@forked
def test_ranks_of_a_whole_run_must_follow_the_rules():
    def play(rank, *values):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with contextlib.suppress(BreaksNCCL):
            dist.broadcast(values[rank], src=0)

    assert fork_ranks(2, lambda rank: play(rank, torch.zeros(2), torch.ones(2))) == [0, 0]
    with pytest.raises(BreaksNCCL, match=r"rank-1: broadcast_: NCCL needs contiguous tensors"):
        fork_ranks(2, lambda rank: play(rank, torch.zeros(2), torch.zeros(2).expand(2, 2)))
    with pytest.raises(BreaksNCCL, match=r"collective 0: rank 0: broadcast_ \[\[2\]\]"):
        fork_ranks(2, lambda rank: play(rank, torch.zeros(2), torch.zeros(3)))
