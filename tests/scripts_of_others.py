"""Programs as people write them who never heard of hpcrun, for the tests that launch any script."""

DDP = '''
"""Trains with plain DDP; keeps a checkpoint of its own and resumes from it. Written for torchrun."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps, folder, pause = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
stop = []


def on_signal(number, frame):
    stop.append(signal.Signals(number).name)
    print(f"rank {os.environ['RANK']} got {stop[-1]}", flush=True)


signal.signal(signal.SIGTERM, on_signal)
signal.signal(signal.SIGUSR2, on_signal)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert rank == int(os.environ["RANK"]) and world == int(os.environ["WORLD_SIZE"])
assert int(os.environ["LOCAL_RANK"]) < int(os.environ["LOCAL_WORLD_SIZE"])
torch.manual_seed(7)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
start, path = 0, folder / "state.pt"
if path.exists():
    saved = torch.load(path)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
print(f"rank {rank} of {world} starts at step {start}", flush=True)


def save(step):
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, folder / "state.tmp")
        (folder / "state.tmp").rename(path)
    dist.barrier()


for step in range(start, steps):
    if (folder / "crash").exists() and rank == 1:
        (folder / "crash").unlink()
        raise ValueError("broken data")
    generator = torch.Generator().manual_seed(step * world + rank)
    x = torch.randn(16, 8, generator=generator)
    loss = (model(x).squeeze(-1) - x.sum(-1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(pause)
    asked = torch.tensor([len(stop)])
    dist.all_reduce(asked)
    if asked.item():
        save(step + 1)
        print(f"rank {rank} stops after step {step + 1}", flush=True)
        break
else:
    save(steps)
    print(f"rank {rank} is done", flush=True)
dist.destroy_process_group()
'''

UNAWARE = '''
"""Knows nothing of signals: counts how often it was started, and works until it is told that it is enough."""

import os
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
path = folder / f"starts-{os.environ['RANK']}"
path.write_text(str(int(path.read_text()) + 1 if path.exists() else 1))
while not (folder / "enough").exists():
    time.sleep(0.1)
'''
