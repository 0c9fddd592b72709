"""Parameters that are unfrozen during training. Run by ``equivalence``."""

import tempfile

import torch
import torch.distributed as dist

from hpcrun import Task
from hpcrun.errors import UserError
from hpcrun.train.data.batching import Batching
from hpcrun.train.step.micro_batches import MicroBatchStep
from tests.train.sharing import BATCH, Net, Way, batches, flat, loss, trainer


def thawing(model, batch):
    """Return the loss of a model in which the last block is trained from the fourth pass."""
    for parameter in model.blocks[-1].parameters():
        parameter.requires_grad_(int(model.passes) >= 3)
    return loss(model, batch)


def unfreezing_when_sharded(rank):
    """Return the weights with and without differing ranks, the latter resumed before and after unfreezing."""
    way = Way("fsdp", 2)

    def train(made, first, last):
        for step in batches(way, rank, first, last):
            made.training_step(step, thawing)
        return made

    def weights(made):
        whole = made.whole_module()
        return [] if whole is None else flat(whole)

    found = [weights(train(trainer(way, rank), 0, 6))]
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, src=0)
        calm, saves = trainer(way, rank, unused=True), {2: f"{folders[0]}/2", 4: f"{folders[0]}/4"}
        for step, place in saves.items():
            train(calm, step - 2, step).save_checkpoint(place, step)
        found.append(weights(train(calm, 4, 6)))
        for step, place in saves.items():
            again = trainer(way, rank, seed=1, unused=True)
            again.load_checkpoint(place)
            found.append(weights(train(again, step, 6)))
    return found


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


def thawed_in_the_loop(rank):
    """Return the messages and their steps, for replicas and shards."""
    found = []
    for way in (Way("ddp", 2), Way("fsdp", 2), Way("fsdp", 2, recompute="full")):
        made = trainer(
            way,
            rank,
            make=Thawing,
            build=lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad]),
        )
        take = MicroBatchStep(made, OnePass(), Batching(BATCH, 2))
        for number, step in enumerate(batches(way, rank, 0, 6)):
            try:
                take(number, step)
            except UserError as error:
                found.append(str(error))
                break
    return found
