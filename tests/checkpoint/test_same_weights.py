"""Ranks whose weights differ are found after the first step, and other differences are allowed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import hpcrun
from hpcrun.checkpoint.sharded.same_weights import require_same_weights
from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from tests.support.on_ranks import gathered, ranks


class Packed(torch.Tensor):
    """A weight without a view of its bits, as the quantized ones of some packages."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].shape)
        raise NotImplementedError(function)


def trained(model, folder, x, forward=None):
    """Make two steps of a plain loop on ``x``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = hpcrun.resumable(model=model, optimizer=optimizer, folder=folder)
    for _ in range(2):
        optimizer.zero_grad()
        mse_loss((forward or model)(x), x[:, :1]).backward()
        optimizer.step()
        state.step()
    state.finish()


def other_seed(folder, rank, x):
    torch.manual_seed(rank)
    trained(nn.Linear(2, 1), folder, x)


def other_data(folder, rank, x):
    trained(nn.Linear(2, 1), folder, x)


def after_a_warm_up(folder, rank, x):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    state = hpcrun.resumable(model=model, optimizer=optimizer, folder=folder)
    for rate in (0.0, 0.1):
        optimizer.param_groups[0]["lr"] = rate
        mse_loss(model(x), x[:, :1]).backward()
        optimizer.step()
        state.step()


def around_ddp(folder, rank, x):
    model = nn.Linear(2, 1)
    trained(DistributedDataParallel(model), folder, x, forward=model)


def in_the_trainer(folder, rank, x):
    def noisy(model, batch):
        with torch.no_grad():
            model.module.weight.add_(rank)
        return mse_loss(model(batch), batch[:, :1])

    trainer = hpcrun.DistributedAMPTrainer(nn.Linear(2, 1), learning_rate=0.1)
    trainer.setup_distributed()
    trainer.wrap_model()
    trainer.training_step(x, noisy)


REFUSED = {
    other_seed: r"\(and 1 more\) differs between the ranks after step 1, so .*; wrap the model in",
    other_data: r"\(and 1 more\) differs between the ranks after step 1, so",
    after_a_warm_up: r"\(and 1 more\) differs between the ranks after step 2, so",
    around_ddp: r"\(and 1 more\) differs .*; call the model that DistributedDataParallel has returned",
    in_the_trainer: "differs between the ranks after step 1",
}


@ranks(2)
def test_different_weights_are_refused_in_the_first_steps(tmp_path, rank):
    for loop, words in REFUSED.items():
        torch.manual_seed(0)
        x = torch.randn(8, 2)[4 * rank :][:4]
        folder = tmp_path / loop.__name__
        with pytest.raises(UserError, match=rf"^model\.weight {words}") as refused:
            loop(folder, rank, x)
        # Bad input, which does not start again.
        assert not isinstance(refused.value, hpcrun.CheckpointError)
        assert not list(folder.glob("step-*"))


def locally(folder, rank, steps):
    """Average the weights every third step (local SGD); return the weights after ``steps`` steps."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = hpcrun.resumable(
        model=model, optimizer=optimizer, folder=folder, every=2, same_weights=False
    )
    while state.steps < steps:
        x = torch.randn(4, 2) + rank
        optimizer.zero_grad()
        mse_loss(model(x), x[:, :1]).backward()
        optimizer.step()
        if state.steps % 3 == 2:
            for value in model.parameters():
                dist.all_reduce(value.data)
                value.data /= 2
        state.step()
    state.finish()
    return torch.cat([value.detach().flatten() for value in model.parameters()])


@ranks(2, 2)
def test_local_sgd_resumes_with_the_weights_of_each_rank(tmp_path, rank, phase):
    whole = tmp_path / f"whole-{rank}.pt"
    if phase == 0:
        torch.save(locally(tmp_path / "whole", rank, 7), whole)
        locally(tmp_path / "cut", rank, 4)
        return
    resumed = locally(tmp_path / "cut", rank, 7)
    assert torch.equal(resumed, torch.load(whole))
    assert len({tuple(each) for each in gathered(resumed.tolist())}) == 2
    torch.manual_seed(rank)
    with pytest.raises(UserError, match=r"same_weights=False to hpcrun\.resumable"):
        trained(nn.Linear(2, 1), tmp_path / "refused", torch.ones(4, 2))


@ranks(2)
def test_differences_that_belong_to_a_training_are_allowed(tmp_path, rank):
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(0)
    # The buffers of the batch norm differ.
    trained(
        DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))),
        tmp_path / "a",
        x,
    )
    sharded = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    fully_shard(sharded)
    trained(sharded, tmp_path / "b", x)
    everyone = Ranks(rank, 2, dist.new_group(backend="gloo"))
    # The stages of a pipeline; parameters that DDP ignores, as experts; other types; no parameter.
    stage = nn.ModuleDict({f"stage{rank}": nn.Linear(2, 1)})
    require_same_weights(stage, everyone, steps=1)
    experts = nn.ModuleDict({"gate": nn.Linear(2, 2), "expert": nn.Linear(2, 1)})
    names = ["expert.weight", "expert.bias"]
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(experts, names)
    wrapped = DistributedDataParallel(experts)
    with torch.no_grad():
        experts["expert"].weight.fill_(rank)
    require_same_weights(wrapped, everyone, steps=1)
    kinds = (torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn)
    typed = nn.ParameterList(
        [nn.Parameter(torch.ones(3).to(kind), requires_grad=False) for kind in kinds]
    )
    require_same_weights(typed, everyone, steps=1)
    require_same_weights(nn.Identity(), everyone, steps=1)
    packed = nn.ParameterList([nn.Parameter(Packed((2, 2)), requires_grad=False)])
    require_same_weights(packed, everyone, steps=1)
