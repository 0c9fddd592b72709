"""Starts the ranks of this machine by `python spawned.py`, as the distributed guide does (document 003).

MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK (the first rank of this machine) describe several machines.
Without them, all ranks are on this machine.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import hpcrun


class Model(nn.Module):
    """Returns a mapping with the loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x):
        return {"loss": (self.layers(x).squeeze(1) - x.sum(1)).square().mean()}


def train(local_rank, first, world_size):
    rank = first + local_rank
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    generator = torch.Generator().manual_seed(rank)
    for _ in range(12):
        batch = torch.randn(128 // world_size, 8, generator=generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(batch)["loss"]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    average = loss.detach().clone()
    dist.all_reduce(average, op=dist.ReduceOp.SUM)
    if hpcrun.is_main_process():
        print(f"{world_size} ranks, average loss {average.item() / world_size:.4f}", flush=True)
    hpcrun.cleanup_distributed()


if __name__ == "__main__":
    here = int(sys.argv[1])
    os.environ.setdefault("MASTER_ADDR", "localhost")
    world_size = int(os.environ.get("WORLD_SIZE", here))
    mp.spawn(train, args=(int(os.environ.get("RANK", 0)), world_size), nprocs=here, join=True)
