"""Several real gloo ranks validate like a single rank."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpcrun.train.evaluation.validate import validate
from hpcrun.train.evaluation.validation_data import ValidationData
from tests.ranks import agreed, gathered, ranks
from tests.train.small import Pairs, batches, digest, loss, make_trainer, noisy


class Mean:
    """A task with the methods that validation needs."""

    def loss(self, model, batch):
        return loss(model, batch)

    def weight(self, batch):
        return None


@ranks(4)
def test_validation_is_the_mean_over_all_samples_of_the_model_that_rank_0_saves(rank):
    trainer = make_trainer(rank, 4, noisy)
    trainer.module[3].eval()
    for step in batches(rank, 4, 0, 2):
        trainer.training_step(step, loss)
    group = trainer.control_group()
    own_buffers = digest(trainer.module.buffers())
    assert len(set(gathered(own_buffers))) > 1
    reference = copy.deepcopy(trainer.module)
    for buffer in reference.buffers():
        dist.broadcast(buffer, src=0)
    reference.eval()
    for size in (50, 7, 2):
        data = Pairs(size)
        chosen = ValidationData(
            data, rank=rank, world_size=4, batch_size=8, accumulation=2, limit=None
        )
        value = agreed(validate(trainer, Mean(), chosen, group=group))
        with torch.no_grad():
            every = [loss(reference, (x[None], y[None])) for x, y in (data[i] for i in range(size))]
        assert value == pytest.approx(torch.stack(every).mean().item(), rel=1e-6)
    # Validation leaves buffers and modes as they were.
    assert digest(trainer.module.buffers()) == own_buffers
    assert [part.training for part in trainer.module] == [True, True, True, False, True]


class Bank(nn.Module):
    """A model with buffers in a layout and a dtype that NCCL refuses, different on each rank."""

    def __init__(self, rank, dtype):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.register_buffer("bank", torch.arange(18.0).reshape(3, 6).T + rank)
        self.register_buffer("table", torch.arange(6, dtype=dtype) + rank)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return (inputs + self.table) @ self.bank


# DDP itself sends int16 buffers as they are.
@pytest.mark.parametrize(("parallel", "dtype"), [("ddp", torch.int32), ("fsdp", torch.int16)])
@ranks(4)
def test_buffers_in_any_layout_are_rank_0s_on_all_ranks(rank, parallel, dtype):
    trainer = make_trainer(rank, 4, partial(Bank, rank, dtype), parallel=parallel)
    task = Mean()
    task.loss = lambda model, batch: model(batch[0]).square().mean()
    (step,) = batches(rank, 4, 0, 1)
    trainer.training_step(step, task.loss)
    agreed(validate(trainer, task, [(step[0], 4)], group=dist.new_group(backend="gloo")))
    bank, table = trainer.module.bank, trainer.module.table
    assert bank.tolist() == torch.arange(18.0).reshape(3, 6).T.tolist()
    assert table.tolist() == list(range(6))
    assert bank.stride() == (1, 6)
