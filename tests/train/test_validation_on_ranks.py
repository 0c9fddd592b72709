"""Several real gloo ranks validate like a single rank."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpcrun.train.validation import ValidationData, validate
from tests.support.on_ranks import agreed, gathered, ranks
from tests.support.training import parallelism
from tests.support.training.small_training import Pairs, batches, digest, loss, make_trainer, noisy


class Mean:
    """A task with the methods that validation needs."""

    def loss(self, model, batch):
        return loss(model, batch)

    def weight(self, batch):
        return None


@ranks(4)
def test_validation_is_the_mean_over_all_samples(rank):
    trainer = make_trainer(rank, 4, noisy)
    trainer.module[3].eval()
    for step in batches(rank, 4, 0, 2):
        trainer.training_step(step, loss)
    everyone = trainer.control_ranks()
    own_buffers = digest(trainer.module.buffers())
    assert len(set(gathered(own_buffers))) > 1
    reference = copy.deepcopy(trainer.module)
    for buffer in reference.buffers():
        dist.broadcast(buffer, src=0)
    reference.eval()
    for size in (50, 7, 2):
        data = Pairs(size)
        chosen = ValidationData(data, everyone, batch_size=8, accumulation=2, limit=None)
        value = agreed(validate(trainer, Mean(), chosen, ranks=everyone))
        with torch.no_grad():
            every = [loss(reference, (x[None], y[None])) for x, y in (data[i] for i in range(size))]
        assert value == pytest.approx(torch.stack(every).mean().item(), rel=1e-6)
    # Validation leaves buffers and modes as they were.
    assert digest(trainer.module.buffers()) == own_buffers
    assert [part.training for part in trainer.module] == [True, True, True, False, True]


@ranks(4)
def test_a_sharded_model_is_validated_on_all_samples(rank):
    way = parallelism.Way("fsdp", 4)
    trainer = parallelism.trainer(way, rank)
    for step in parallelism.batches(way, rank, 0, 2):
        trainer.training_step(step, loss)
    everyone = trainer.control_ranks()

    def over_ranks(size):
        chosen = ValidationData(
            Pairs(size), everyone, batch_size=8, accumulation=2, limit=None,
            same_count=trainer.forward_is_collective,
        )  # fmt: skip
        return agreed(validate(trainer, Mean(), chosen, ranks=everyone))

    def check(size):
        """Compare with the whole model."""
        value, whole, data = over_ranks(size), trainer.whole_module(), Pairs(size)
        if whole is not None:
            inputs, targets = zip(*(data[index] for index in range(size)), strict=True)
            with torch.no_grad():
                expected = loss(whole.eval(), (torch.stack(inputs), torch.stack(targets)))
            assert value == pytest.approx(expected.item(), rel=1e-5)
        return value

    of_fifty, _, _ = (check(size) for size in (50, 7, 2))
    # Weights gathered for one validation must not remain for the next.
    over_ranks(2)
    with torch.no_grad():
        for parameter in trainer.module.parameters():
            parameter.mul_(0.5)
    assert check(50) != pytest.approx(of_fifty, rel=1e-3)
    before = trainer.whole_module()
    trainer.training_step(parallelism.batches(way, rank, 2, 3)[0], loss)
    after = trainer.whole_module()
    assert before is None or not torch.equal(parallelism.flat(before), parallelism.flat(after))


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
    agreed(validate(trainer, task, [(step[0], 4)], ranks=trainer.control_ranks()))
    bank, table = trainer.module.bank, trainer.module.table
    assert bank.tolist() == torch.arange(18.0).reshape(3, 6).T.tolist()
    assert table.tolist() == list(range(6))
    assert bank.stride() == (1, 6)
