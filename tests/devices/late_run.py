"""Part of ``late_device_program.py``: a whole run of one rank on the late device, and the same on the CPU.

The run logs, validates, saves, profiles and skips a step. Between these, the host must not wait for a step:
it may only read the decision about the step before, while the next step is queued.
"""

import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hpcrun.config import override_layer, resolve, to_yaml
from hpcrun.devices import vendor
from hpcrun.ranks.signals import STOP
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.files import read_lines
from hpcrun.train.task import Task
from hpcrun.worker import run_rank
from tests.devices.late_device import QUEUE
from tests.support import jobs

OVERFLOWS = 10
"""Step (from 0) with gradients that are not finite; the host learns of it in the next step."""

CALM = (4, 5, 6, 9, 10, 12, 13, 14)
"""Steps (from 0) after which the run neither logs, saves, profiles nor reports a skipped step."""

SETTINGS = [
    f"task={__name__}:Watched",
    *("job.gpus=1", "train.steps=16", "train.batch_size=4", "train.log_every=4"),
    *(
        "checkpoint.every=9",
        "train.validate_every=12",
        "train.profile=2-3",
        "train.deterministic=false",
    ),
    *("train.hang_after=null", "data.workers=0"),
]
VARIABLES = {
    **{"HPCRUN_LOCAL_CLUSTER": "1", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"},
    **{"SLURM_STEP_NODELIST": "local0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"},
    **{"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    **{"SLURM_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"},
}


class Watched(Task):
    """A task that notes the host's waits between the forward passes of two steps."""

    waits: ClassVar[list[list[tuple[str, bool]]]] = []

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    def train_dataset(self) -> TensorDataset:
        values = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        return TensorDataset(values, torch.arange(64))

    def validation_dataset(self) -> TensorDataset:
        return self.train_dataset()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            QUEUE.waits = []
            self.waits.append(QUEUE.waits)
        value = model(batch[0]).square().mean()
        return value * float("inf") if model.training and self.step == OVERFLOWS else value


def run(folder: Path, *, gpu: bool) -> RunDirectory:
    """Train as the only rank of a run, and return the run."""
    layers = [*SETTINGS, f"job.cpu={str(not gpu).lower()}"]
    made = create(folder, to_yaml(resolve([override_layer(layers)])), {"created": time.time()})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        assert run_rank(made.path, STOP) == 0
    return made


def results(made: RunDirectory) -> Any:
    """Return what a run has computed: the lines of its metrics without times, and its last checkpoint."""
    keys = ("step", "loss", "lr", "gradient_norm", "validation_loss", "skipped")
    lines = [{key: line.get(key) for key in keys} for line in read_lines(made.metrics)]
    state = jobs.final_state(made)
    return lines, {name: value for name, value in state.items() if isinstance(value, bytes)}


def problems(folder: Path) -> list[str]:
    """Train on the CPU and on the device, which is plugged in; return what is wrong on the device."""
    right = results(run(folder / "cpu", gpu=False))
    Watched.waits.clear()
    QUEUE.pageable = 0
    stop = torch.profiler.profile.stop
    found: list[str] = []
    locked: list[int] = []

    def stopped(profiler: Any) -> None:
        if QUEUE.left:
            found.append("the profiler stops before the work of its steps has ended")
        stop(profiler)

    def lock(address: int, size: int) -> tuple[None, str]:
        locked.append(size)
        return None, ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.profiler.profile, "stop", stopped)
        patch.setattr(vendor, "lock_pages", lock)
        other = results(run(folder / "device", gpu=True))
    if not locked:
        found.append("the memory for snapshots is not page-locked")
    if other != right:
        found.append(f"the numbers are {other}, not {right}")
    if QUEUE.pageable:
        found.append(f"{QUEUE.pageable} batches come from pageable memory")
    for step in CALM:
        waits = Watched.waits[step]
        if any(cause != "event" or drained for cause, drained in waits):
            found.append(f"step {step}: the host waits until the device has no work: {waits}")
    return found
