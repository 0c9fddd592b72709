"""Wrapping a model in your own loop, the units of FSDP by size or policy, and the sampler."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import hpcrun
from hpcrun.config.training import FSDP
from hpcrun.train.model.units import by_policy, by_size
from hpcrun.train.parallel.fsdp import units
from tests.support.on_ranks import agreed, gathered, ranks
from tests.support.training.parallelism import Block, Net


def names(model, parts):
    return [next(name for name, part in model.named_modules() if part is one) for one in parts]


def test_units_by_size_count_parameters_outside_inner_units():
    net = Net()
    # widen has 27 x 13 + 27 = 378 parameters, shrink 13 x 27 + 13 = 364, the norm 26.
    assert names(net, by_size(net, 370)) == [
        "blocks.0.widen",
        "blocks.0",
        "blocks.1.widen",
        "blocks.1",
    ]
    assert names(net, by_size(net, 400)) == ["blocks.0", "blocks.1"]
    assert by_size(net, 5000) == []
    found, compiled = units(net, FSDP(wrap="size", min_parameters=370))
    assert names(net, found) == names(net, by_size(net, 370))
    assert names(net, compiled) == ["blocks.0.widen", "blocks.1.widen"]


def test_units_follow_a_policy_of_torch_or_of_the_user():
    net = Net()
    blocks = ["blocks.0", "blocks.1"]
    for policy in (
        400,
        partial(size_based_auto_wrap_policy, min_num_params=400),
        ModuleWrapPolicy({Block}),
        lambda part: isinstance(part, Block),
    ):
        assert names(net, by_policy(net, policy)) == blocks
    assert by_policy(net, lambda _: False) == []
    with pytest.raises(TypeError, match="a str is no policy; give a number of parameters"):
        by_policy(net, "auto")
    with pytest.raises(ValueError, match="at least 1 parameter"):
        by_policy(net, 0)


def test_one_process_keeps_its_model():
    net = Net()
    assert hpcrun.wrap_model_ddp(net, 0) is net
    assert hpcrun.wrap_model_fsdp(net) is net
    assert not isinstance(net, FSDPModule)


def test_several_ranks_need_a_process_group(monkeypatch):
    numbers = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="setup_distributed"):
        hpcrun.wrap_model_ddp(Net())


@ranks(2)
def test_ddp_and_fsdp_give_the_weights_of_the_whole_batch(rank):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    weights = []
    wraps = (
        lambda net: hpcrun.wrap_model_ddp(net, rank),
        hpcrun.wrap_model_fsdp,
        partial(hpcrun.wrap_model_fsdp, auto_wrap_policy=400),
        lambda net: net,
    )
    for wrap in wraps:
        torch.manual_seed(0 if wrap is wraps[-1] else rank)  # rank 0's weights count
        model = wrap(Net())
        sampler = hpcrun.DistributedSampler(9, 4)  # the ninth sample belongs to no rank
        loader = DataLoader(TensorDataset(x), batch_size=4, sampler=sampler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        whole = wrap is wraps[-1]
        for (part,) in [(x,)] if whole else loader:
            model(part).square().mean().backward()
            optimizer.step()
        full = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
        weights.append(torch.cat([p.detach().flatten() for p in full]))
    for other in weights[:-1]:
        torch.testing.assert_close(other, weights[-1])
    replicated, sharded = hpcrun.wrap_model_ddp(Net()), hpcrun.wrap_model_fsdp(Net())
    assert isinstance(replicated, DistributedDataParallel)
    assert hpcrun.wrap_model_ddp(replicated, rank) is replicated
    assert hpcrun.wrap_model_fsdp(sharded) is sharded
    with pytest.raises(hpcrun.UserError, match=r"wrap_model_ddp\(\): the model is sharded already"):
        hpcrun.wrap_model_ddp(sharded)
    with pytest.raises(hpcrun.UserError, match=r"wrap_model_fsdp\(\): the model is in DDP"):
        hpcrun.wrap_model_fsdp(replicated)
    agreed([value.sum().item() for value in weights])
    assert gathered(list(hpcrun.DistributedSampler(9, 4))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert dist.get_world_size() == 2


def test_a_sampler_has_a_contiguous_range_for_each_rank():
    sampler = hpcrun.DistributedSampler(11, 2, rank=1, world_size=3)
    assert (sampler.num_samples, sampler.start_idx, sampler.end_idx) == (3, 3, 6)
    assert sampler.get_indices() == range(3, 6)
    assert (list(sampler), len(sampler), sampler.num_batches) == ([3, 4, 5], 3, 2)
    assert hpcrun.DistributedSampler(5, 2).get_indices() == range(5)
    for values, part in (((5, 2, 3, 3), "rank from 0"), ((2, 2, 0, 3), "at least 1 sample")):
        with pytest.raises(ValueError, match=part):
            hpcrun.DistributedSampler(*values)
