"""Small tasks for whole runs."""

import os
import random
import signal

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from hpcrun import Task, get_rank


class Noisy(Dataset):
    """Samples with noise from every generator that a data set may use."""

    def __init__(self, size=24):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        noise = torch.rand(4) + random.random() + np.random.rand()
        return torch.full((4,), index / self.size) + noise


class Regression(Task):
    """A task that learns a sum of noisy numbers, with a warmed-up loss.

    ``stop_at`` sends rank 1 a SIGTERM at that call of the loss.
    """

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    def train_dataset(self):
        return Noisy()

    def loss(self, model, batch):
        if model.training:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == self.config.model.own.get("stop_at") and get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            self.mishap()
        warm = min(1.0, (self.step + 1) / 20)
        return warm * (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()

    def mishap(self):
        """Accept a hook of subclasses."""


class Exact(Regression):
    """The same task without randomness, and with blocks."""

    class Known(Noisy):
        def __getitem__(self, index):
            return torch.randn(4, generator=torch.Generator().manual_seed(index))

    def build_model(self):
        blocks = [nn.Linear(8, 8) for _ in range(2)]
        return nn.Sequential(nn.Linear(4, 8), nn.Sequential(*blocks), nn.Tanh(), nn.Linear(8, 1))

    def train_dataset(self):
        return self.Known()


class Chain(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = part(x) if not isinstance(part, nn.ModuleList) else part[1](part[0](x).tanh())
        return x


class Validated(Regression):
    def validation_dataset(self):
        return Noisy(3)


class Short(Noisy):
    """The same task with samples of different lengths, which need a collate function."""

    def __getitem__(self, index):
        return super().__getitem__(index)[: 1 + index % 4]


class Padded(Regression):
    def collate(self, samples):
        return torch.stack([nn.functional.pad(one, (0, 4 - len(one))) for one in samples])


class Ragged(Padded):
    """A task with a collate function, and an optimizer for a frozen and a slow layer."""

    def build_model(self):
        model = super().build_model()
        model[0].bias.requires_grad = False
        return model

    def train_dataset(self):
        return Short()

    def validation_dataset(self):
        return Short(3)

    def build_optimizer(self, model):
        slow = {"params": model[0].parameters(), "lr": 0.001, "weight_decay": 0.0}
        rest = {"params": [*model[1].parameters(), *model[3].parameters()]}
        return torch.optim.AdamW([rest, slow], lr=0.01, weight_decay=0.1)


class Graded(Regression):
    """Validation losses of 5, 3, 1, 4, 2, ..., independent of training."""

    GRADES = (5.0, 3.0, 1.0, 4.0, 2.0, 6.0)

    def validation_dataset(self):
        return Noisy(1)

    def loss(self, model, batch):
        if model.training:
            return super().loss(model, batch)
        self.graded = getattr(self, "graded", 0) + 1
        return torch.tensor(self.GRADES[self.graded - 1])


class Judged(Regression):
    """Validation losses of 5, 3, 1, 4, 2, 6 after every second step, independent of training.

    ``stop_here`` sends this rank a SIGTERM at that call of the loss in training.
    """

    class Counting(nn.Module):
        """Count the calls in training."""

        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 1)
            self.register_buffer("asked", torch.tensor(0))

        def forward(self, inputs):
            self.asked += self.training
            return self.body(inputs)

    def build_model(self):
        return self.Counting()

    def validation_dataset(self):
        return Noisy(1)

    def loss(self, model, batch):
        if model.training:
            return super().loss(model, batch)
        return torch.tensor(Graded.GRADES[self.step // 2 - 1])

    def mishap(self):
        if self.calls == self.config.model.own.get("stop_here"):
            os.kill(os.getpid(), signal.SIGTERM)

    def report(self, model, validation_loss):
        return {
            "weight": model.body.weight.sum().item(),
            "asked": int(model.asked),
            "loss": validation_loss,
        }
