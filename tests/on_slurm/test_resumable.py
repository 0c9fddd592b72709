"""A plain PyTorch script with ``hpcrun.resumable`` on the real Slurm: killed, preempted, the same bits."""

from __future__ import annotations

import pytest

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_lines
from tests.support import jobs

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]

SCRIPT = """
import hashlib
import os
import random
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hpcrun


class Noisy(Dataset):
    def __len__(self):
        return 45

    def __getitem__(self, index):
        return torch.rand(4) + index / 45, torch.tensor([random.random()])


torch.distributed.init_process_group("gloo")
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.1), nn.Linear(9, 1))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Noisy(), batch_size=2, sampler=DistributedSampler(Noisy()), num_workers=1)
state = hpcrun.resumable(model=model, optimizer=optimizer, loader=loader, every=4)
first = os.environ["HPCRUN_RESTART"] == "0"
for epoch in state.epochs(6):
    for x, y in state.batches(loader):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        hpcrun.report(state.steps + 1, loss=loss)
        if sys.argv[1] == "disturbed":
            time.sleep(0.3)
            if first and state.steps == 9 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
        state.step()
weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
if os.environ["RANK"] == "0":
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def bench(slurm: SlurmCluster) -> Bench:
    return Bench(slurm)


def weights(run: RunDirectory) -> str:
    """Return the hash of the final weights, which rank 0 has printed once."""
    logs = "".join(path.read_text() for path in sorted(run.logs.rglob("rank-00000.log")))
    (found,) = [line for line in logs.splitlines() if line.startswith("weights ")]
    return found


def test_a_killed_and_preempted_script_ends_with_the_same_bits(bench: Bench) -> None:
    bench.write("train.py", SCRIPT)
    run = bench.submit("disturbed", "--", "python", "train.py", "disturbed")
    calm = bench.submit("calm", "--", "python", "train.py", "calm")
    bench.wait_for_end(bench.status("calm")["job"])
    bench.slurm.wait_until(
        lambda: any(line["step"] >= 15 for line in read_lines(run.metrics)),
        ENDED,
        lambda: bench.told(run),
    )
    bench.preempt_everything()
    bench.slurm.wait_until(run.result.exists, ENDED, lambda: bench.told(run))
    causes = [event.cause for event in jobs.events(run, "ended")]
    assert causes[1:] == ["preemption", "finished"], bench.told(run)
    assert jobs.result(run)["state"] == "finished"
    assert weights(run) == weights(calm)
    assert "step-000000036" in {path.name for path in run.checkpoints.iterdir()}
    assert "36" in bench.hpcrun("status", "disturbed")
    bench.hpcrun("verify", "disturbed")
