"""Starts its own ranks on this machine and trains a small model: no launcher, no scheduler.

`python standalone.py` reads `parallel.yaml` in the current folder:

    parallel:
      world_size: 2
      rank: null            # each process has its own
      master_addr: localhost
      master_port: "12355"

Rank 0 saves, validates, and decides about a stop. docs/own-loop.md describes a loop that resumes exactly.
"""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import hpcrun

EPOCHS, PATIENCE = 30, 2


class Trainer:
    """Trains one epoch after the other; rank 0 validates and decides about a stop."""

    def __init__(self, place, train, validation):
        self.epoch, self.place, self.validation = 0, place, validation
        torch.manual_seed(0)
        self.trainer = hpcrun.DistributedAMPTrainer(
            nn.Linear(4, 1),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.2),
            distributed=place,
        )
        self.trainer.setup_distributed()
        self.trainer.wrap_model()
        part = hpcrun.DistributedSampler(len(train), 8, place.rank, place.world_size)
        self.loader = DataLoader(Subset(train, part.get_indices()), batch_size=8)
        self.best, self.bad = float("inf"), 0

    def loss(self, model, batch):
        x, y = batch
        return (model(x).squeeze(1) - y).square().mean()

    def stops(self):
        """Validate on rank 0, which has the data, and broadcast its decision."""
        decision = torch.zeros(1)
        if self.validation is not None:
            with torch.no_grad():
                value = self.loss(self.trainer.module, self.validation).item()
            self.bad = 0 if value < self.best - 1e-4 else self.bad + 1
            self.best = min(self.best, value)
            decision.fill_(self.bad >= PATIENCE)
        dist.broadcast(decision, src=0)
        return bool(decision)

    def run(self):
        while self.epoch < EPOCHS:
            for batch in self.loader:
                self.trainer.training_step(batch, self.loss)
            self.epoch += 1
            if self.trainer.is_main_process:
                self.trainer.save_checkpoint("checkpoint.pt", self.epoch)
            dist.barrier()
            if self.stops():
                break
        print(f"rank {self.place.rank} ended after {self.epoch} epochs", flush=True)


def train(rank):
    place = hpcrun.DistributedConfig.from_file("parallel.yaml", rank=rank)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    held = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    validation = (held, held.sum(1)) if rank == 0 else None
    Trainer(place, TensorDataset(inputs, inputs.sum(1)), validation).run()
    hpcrun.cleanup_distributed()


if __name__ == "__main__":
    world_size = yaml.safe_load(Path("parallel.yaml").read_text())["parallel"]["world_size"]
    mp.spawn(train, nprocs=world_size)
