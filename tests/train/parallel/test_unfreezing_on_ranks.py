"""Parameters of sharded models that are unfrozen during training."""

import pytest
import torch

from hpcrun import Task
from hpcrun.errors import UserError
from hpcrun.train.data.batching import Batching
from hpcrun.train.step.micro_batches import MicroBatchStep
from tests.support.on_ranks import ranks
from tests.support.training.parallelism import BATCH, Net, Way, batches, flat, trainer
from tests.support.training.small_training import loss


def thawing(model, batch):
    """Return the loss of a model in which the last block is trained from the fourth pass."""
    for parameter in model.blocks[-1].parameters():
        parameter.requires_grad_(int(model.passes) >= 3)
    return loss(model, batch)


@ranks(2)
def test_a_block_unfrozen_later_is_trained_and_resumed(rank, tmp_path):
    way = Way("fsdp", 2)

    def train(made, first, last):
        for step in batches(way, rank, first, last):
            made.training_step(step, thawing)
        return made

    plain = train(trainer(way, rank), 0, 6).whole_module()
    compared = train(trainer(way, rank), 0, 2)
    # Saved before and after unfreezing.
    compared.save_checkpoint(tmp_path / "2", 2)
    train(compared, 2, 4).save_checkpoint(tmp_path / "4", 4)
    wholes = [train(compared, 4, 6).whole_module()]
    for step in (2, 4):
        again = trainer(way, rank, seed=1)
        again.load_checkpoint(tmp_path / str(step))
        wholes.append(train(again, step, 6).whole_module())
    if rank == 0:
        assert [torch.equal(flat(whole), flat(plain)) for whole in wholes] == [True] * 3


class Thawing(Net):
    """A model in which the last block is trained from the third pass."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.blocks[-1].requires_grad_(False)

    def forward(self, x):
        if self.passes >= 2:
            self.blocks[-1].requires_grad_(True)
        return super().forward(x)


class OnePass(Task):
    """A task with the methods that the training loop needs in a step."""

    def __init__(self):
        pass

    def build_model(self):
        raise NotImplementedError

    def train_dataset(self):
        raise NotImplementedError

    def loss(self, model, batch):
        return loss(model, batch)


@ranks(2)
def test_a_block_unfrozen_in_the_loop_is_refused(rank):
    way = Way("ddp", 2)
    made = trainer(
        way,
        rank,
        make=Thawing,
        build=lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad]),
    )
    take = MicroBatchStep(made, OnePass(), Batching(BATCH, 2))
    first, second, third = batches(way, rank, 0, 3)
    take(0, first)
    take(1, second)
    with pytest.raises(
        UserError,
        match=r"became True in step 2 for blocks\.1\.norm\.weight, blocks\.1\.norm\.bias, ",
    ):
        take(2, third)
