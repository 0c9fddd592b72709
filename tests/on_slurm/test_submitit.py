"""A submitit job that uses ``hpcrun.resumable`` on the real Slurm: requeued by submitit, the same bits."""

from __future__ import annotations

import pytest

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]

JOB = """
import hashlib
import pathlib
import time

import submitit
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpcrun


class Train(submitit.helpers.Checkpointable):
    def __init__(self, name, pause):
        self.name, self.pause = name, pause == "wait"

    def __call__(self):
        place = hpcrun.setup_distributed()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 9), nn.Dropout(0.1), nn.Linear(9, 1))
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        numbers = torch.randn(64, 8)
        data = TensorDataset(numbers, numbers.sum(1))
        loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
        folder = pathlib.Path(f"checkpoints-{self.name}")
        state = hpcrun.resumable(
            model=model, optimizer=optimizer, loader=loader, folder=folder, every=1000
        )
        print("begins at", state.steps, flush=True)
        waits = self.pause and state.steps == 0
        for _ in state.epochs(20):
            for x, y in state.batches(loader):
                optimizer.zero_grad()
                (model(x).squeeze(1) - y).square().mean().backward()
                optimizer.step()
                pathlib.Path(f"started-{self.name}").touch()
                while waits and not hpcrun.STOP.reason:
                    time.sleep(0.1)
                state.step()
        weights = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
        hpcrun.cleanup_distributed()
        return hashlib.sha256(weights).hexdigest()


def submit(name, pause):
    executor = submitit.SlurmExecutor(folder=f"submitit-{name}")
    # submitit counts a signal at any time of such a short job as its time limit.
    executor.update_parameters(
        partition="batch", nodes=2, ntasks_per_node=1, cpus_per_task=1, time=10
    )
    return executor.submit(Train(name, pause))

"""

RESULTS = """
import sys
import submitit

name, job = sys.argv[1:]
print(*submitit.SlurmJob(f"submitit-{name}", job, tasks=[0, 1]).results())
"""


@pytest.fixture(scope="module")
def bench(slurm: SlurmCluster) -> Bench:
    return Bench(slurm)


def python(bench: Bench, *words: str) -> str:
    """Return the output of a Python program of the job user."""
    environ = bench.environment()
    environ["PYTHONPATH"] += f":{bench.folder}"
    command = [bench.slurm.python, *words]
    return bench.slurm.run(command, cwd=bench.folder, env=environ).stdout.strip()


def test_submitit_requeues_a_training_that_hpcrun_has_saved(bench: Bench) -> None:
    bench.write("job.py", JOB)
    submit = "import sys, job; print(job.submit(sys.argv[1], sys.argv[2]).job_id)"
    disturbed = python(bench, "-c", submit, "disturbed", "wait")
    calm = python(bench, "-c", submit, "calm", "go on")

    def logs() -> str:
        found = sorted((bench.folder / "submitit-disturbed").glob("*_log.*"))
        return "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in found)

    bench.slurm.wait_until((bench.folder / "started-disturbed").exists, ENDED, logs)
    bench.slurm.run(["scancel", "--signal=USR2", disturbed])
    bench.slurm.wait_until(lambda: bench.slurm.restarts(disturbed) == 1, ENDED, logs)
    bench.wait_for_end(disturbed)
    bench.wait_for_end(calm)
    told = logs()
    assert "saved; the program's own handler continues" in told
    assert "begins at 2" in told
    weights = python(bench, "-c", RESULTS, "disturbed", disturbed).split()
    assert weights == python(bench, "-c", RESULTS, "calm", calm).split()
    assert weights[0] == weights[1]
