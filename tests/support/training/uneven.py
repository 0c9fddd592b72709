"""Tasks and trainings with batches that do not divide evenly among three ranks."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from hpcrun import Task
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.data.batches import training_steps
from hpcrun.train.step.micro_batches import MicroBatchStep
from hpcrun.train.step.trainer import DistributedAMPTrainer
from tests.support.training.small_training import Pairs, loss, small

WORLD = 3
SIZE, BATCH, SEED = 50, 16, 2
"""Three steps per epoch, and two samples of the fourth step."""


class Plain(Task):
    """A task in which every sample has the same weight."""

    def __init__(self):
        pass

    def build_model(self):
        return small()

    def train_dataset(self):
        return Pairs(SIZE)

    def loss(self, model, batch):
        return loss(model, batch)


class Tokens(Dataset):
    """Rows of six tokens. 0 to 6 tokens have a target."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        targets = torch.randint(5, (6,), generator=generator)
        targets[: index % 7] = -1
        return torch.randn(6, 6, generator=generator), targets


class Masked(Plain):
    """A task in which every token with a target has the same weight."""

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))

    def train_dataset(self):
        return Tokens()

    def loss(self, model, batch):
        tokens, targets = batch
        return F.cross_entropy(
            model(tokens).float().flatten(0, 1), targets.flatten(), ignore_index=-1
        )

    def weight(self, batch):
        return (batch[1] >= 0).sum()


class Counted(Masked):
    """The same task, with weights as numbers instead of tensors."""

    def weight(self, batch):
        return float(super().weight(batch))


class Work:
    """A training run of some steps, on this rank of ``world_size``."""

    def __init__(
        self, rank, world_size=WORLD, *, task=None, batch_size=BATCH, accumulation=1,
        dropout=0.0, parallel="ddp", **options,
    ):  # fmt: skip
        self.task = task or Plain()
        self.shape = {
            "rank": rank,
            "world_size": world_size,
            "batch_size": batch_size,
            "accumulation": accumulation,
        }
        torch.manual_seed(0)
        model = self.task.build_model()
        if dropout:
            model.insert(2, nn.Dropout(dropout))
        self.trainer = DistributedAMPTrainer(
            model,
            lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
            distributed=DistributedConfig(
                world_size=world_size, rank=rank, local_rank=rank, num_gpus_per_node=world_size
            ),
            device="cpu",
            parallel=parallel,
            clip_norm=0.5,
            **options,
        )
        self.trainer.wrap_model()
        torch.manual_seed(100 + rank)

    def steps(self, first, last):
        """Take the steps, and return the losses of this rank."""
        batches = training_steps(
            self.task.train_dataset(), range(first, last), seed=SEED, workers=0, pin_memory=False,
            **self.shape,
        )  # fmt: skip
        take = MicroBatchStep(self.trainer, self.task, batches.batching)
        return [take(step, next(batches)).loss for step in range(first, last)]

    def weights(self):
        return [whole(value) for value in self.trainer.module.state_dict().values()]


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value
