"""A config, a small data set, models and a trainer, for tests on several ranks."""

import hashlib

import torch
from torch import nn

from hpcrun.config import override_layer, resolve
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.data.batches import training_steps
from hpcrun.train.step.trainer import DistributedAMPTrainer


def config(*overrides):
    """Return the config of ``key=value`` overrides."""
    return resolve([override_layer(overrides)])


class Pairs(torch.utils.data.Dataset):
    """A data set of six inputs and a target, each computed from its index."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(size, 6, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.inputs[index].sin().sum()


def loss(model, batch):
    inputs, targets = batch
    return (model(inputs).squeeze(-1).float() - targets).square().mean()


def small():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def noisy():
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 1)
    )


def large():
    """A model with several gradient buckets (the first holds 1 MiB), ready in another order than declared."""

    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.middle, self.first = (
                nn.Linear(512, 1),
                nn.Linear(512, 512),
                nn.Linear(6, 512),
            )
            self.extra = nn.Linear(512, 512)

        def forward(self, inputs):
            return self.last(self.extra(self.middle(self.first(inputs).tanh()).tanh()).tanh())

    return Backwards()


def digest(values):
    joined = b"".join(value.detach().contiguous().numpy().tobytes() for value in values)
    return hashlib.sha256(joined).hexdigest()


def make_trainer(
    rank, world_size, make=small, *, lr=0.05, adam=False, described=None, **options
) -> DistributedAMPTrainer:
    """Return a wrapped trainer, with the same weights on all ranks."""
    torch.manual_seed(0)
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    trainer = DistributedAMPTrainer(
        make(),
        lambda model: kind(model.parameters(), lr=lr),
        distributed=DistributedConfig(
            world_size=world_size,
            rank=rank,
            local_rank=rank,
            num_gpus_per_node=world_size,
            **(described or {}),
        ),
        device="cpu",
        **options,
    )
    trainer.wrap_model()
    return trainer


def batches(rank, world_size, first, last, *, batch_size=16, accumulation=1, size=50):
    """Return this rank's micro-batches of the steps, as a list."""
    return list(
        training_steps(
            Pairs(size),
            range(first, last),
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
            accumulation=accumulation,
            seed=2,
            workers=0,
            pin_memory=False,
        )
    )
