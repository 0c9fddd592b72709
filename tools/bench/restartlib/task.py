"""The task of hpcrun for the benchmark."""

from typing import Any

import torch
from torch import nn

from hpcrun.train.task import Task
from restartlib import model as shared
from restartlib.marks import mark, mark_steps

# A rank imports its task after the rendezvous.
mark("joined")
mark_steps()


class Marked(Task):
    """Train the model of the benchmark."""

    def build_model(self) -> nn.Module:
        return shared.build_model()

    def train_dataset(self) -> shared.Numbers:
        return shared.Numbers()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return shared.loss(model, *batch)
