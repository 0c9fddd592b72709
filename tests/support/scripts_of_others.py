"""Programs without any use of hpcrun, for the tests that launch any script."""

DDP = '''
"""Trains with plain DDP; saves its checkpoint without hpcrun and resumes from it. Written for torchrun."""

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

SPAWN = '''
"""Starts a rank for each GPU of its node with mp.spawn. Each rank is the DDP script next to this script."""

import os
import runpy
import signal
import sys

import torch.multiprocessing as mp

GPUS = 2


def rank(local, node, nodes):
    place = {"RANK": node * GPUS + local, "WORLD_SIZE": nodes * GPUS, "LOCAL_RANK": local}
    os.environ.update({name: str(value) for name, value in place.items()}, LOCAL_WORLD_SIZE=str(GPUS))
    runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGUSR2):
        # The ranks hear the signals too, and save.
        signal.signal(number, lambda number, frame: None)
    mp.spawn(rank, args=(int(os.environ["NODE_RANK"]), int(os.environ["WORLD_SIZE"])), nprocs=GPUS)
'''

UNAWARE = '''
"""Knows nothing of signals: counts its starts, and works until a file ends it."""

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

SAVES = '''
"""Saves for two seconds at a signal to stop, reports that, and asks to be continued."""

import os, signal, sys, time
import hpcrun

def save(number, frame):
    time.sleep(2)
    open(f"saved-{os.environ['RANK']}-{signal.Signals(number).name}", "w").close()
    hpcrun.report(step=7, saved=True)
    sys.exit(75)

for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, save)
if os.environ["HPCRUN_RESTART"] == "0":
    hpcrun.report(step=4)
    open("ready-" + os.environ["RANK"], "x").close()
    time.sleep(600)
'''

LIGHTNING = '''
"""Trains with Lightning's Trainer, which keeps its own checkpoint."""

import sys
import time

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

epochs, folder, pause = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        time.sleep(pause)
        x, y = batch
        return (self.layer(x) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_epoch_start(self):
        print(f"rank {self.global_rank} of {self.trainer.world_size} epoch {self.current_epoch}", flush=True)


lightning.seed_everything(1)
x = torch.randn(32, 4)
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_epochs=epochs, logger=False,
    callbacks=[ModelCheckpoint(dirpath=folder, save_last=True)], enable_progress_bar=False,
)
trainer.fit(Line(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8), ckpt_path="last")
print(f"rank {trainer.global_rank} is done", flush=True)
'''

ACCELERATE = '''
"""Trains with Hugging Face Accelerate, and saves its state every epoch."""

import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

epochs, folder, pause = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
accelerator = Accelerator(cpu=True)
torch.manual_seed(1)
x = torch.randn(32, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
start = 0
if (folder / "epoch").exists():
    start = int((folder / "epoch").read_text())
    accelerator.load_state(folder / f"state-{start}")
for epoch in range(start, epochs):
    print(f"rank {accelerator.process_index} of {accelerator.num_processes} epoch {epoch}", flush=True)
    for inputs, targets in loader:
        time.sleep(pause)
        loss = (model(inputs) - targets).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(folder / f"state-{epoch + 1}")
    if accelerator.is_main_process:
        (folder / "epoch").write_text(str(epoch + 1))
accelerator.wait_for_everyone()
print(f"rank {accelerator.process_index} is done", flush=True)
'''
