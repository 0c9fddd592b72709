"""The task of the checks with whole runs: a small GPT on random bytes, with dropout and planned ends.

A copy of this file is next to the runs, so it imports only hpcrun and torch.
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from hpcrun.config.tasks.language_model import LanguageModelShape
from hpcrun.run.attempt import IN_PLACE
from hpcrun.tasks.llama import Llama
from hpcrun.train.task import Task


class Bytes(Dataset[Tensor]):
    """Random bytes that depend on the index only."""

    def __len__(self) -> int:
        """Return the number of samples."""
        return 499

    def __getitem__(self, index: int) -> Tensor:
        """Return a sample, shape (65,)."""
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (65,), generator=generator)


class Disturbed(Task):
    """Own keys: ``model.warn_at`` and ``model.kill_at`` (rank 0), ``model.raise_at`` (the last rank)."""

    def build_model(self) -> nn.Module:
        """Return the model."""
        return Llama(LanguageModelShape(layers=2, width=128, heads=4, context=64, dropout=0.1))

    def train_dataset(self) -> Bytes:
        """Return the data."""
        return Bytes()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean loss of the next byte."""
        if model.training:
            self._meet()
        logits = model(batch[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def _meet(self) -> None:
        plan, rank = self.config.model.own, int(os.environ["RANK"])
        attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if rank == 0 and attempt == 0 and self.step == plan.get("warn_at"):
            os.kill(os.getpid(), signal.SIGUSR2)
        again = int(os.environ.get(IN_PLACE) or 0)
        if rank == 0 and (attempt, again) == (1, 0) and self.step == plan.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == int(os.environ["WORLD_SIZE"]) - 1 and self.step == plan.get("raise_at"):
            Path(str(plan["raised"])).write_text(repr(time.time()))
            raise ValueError("a planted failure")
