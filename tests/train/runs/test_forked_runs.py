"""A run in forked ranks ends with the weights of a run in fresh processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpcrun.config import override_layer, resolve, to_yaml
from hpcrun.ranks.fork_messages import FORK_SERVER, fork_server_command
from hpcrun.run.directory import RunDirectory, create
from tests.ranks.test_fork_server import answers, until
from tests.support.jobs import final_state
from tests.support.journal import read_events
from tests.support.training.faulty_tasks import Noisy, Regression

ROOT = Path(__file__).parents[3]
RANK = ("-u", "-m", "hpcrun.worker")


class Products(Noisy):
    """Samples from NumPy's linear algebra, which has threads of its own."""

    def __getitem__(self, index: int) -> torch.Tensor:
        matrix = np.random.default_rng(index).random((256, 256), dtype=np.float32)
        return super().__getitem__(index).mean() + torch.from_numpy(matrix @ matrix)[0]


class Threaded(Regression):
    """A model that computes in several threads, and is stopped once. ``mark``: the file that says so."""

    def build_model(self) -> nn.Module:
        layers = [nn.Linear(256, 1024), nn.Tanh(), nn.Dropout(0.2), nn.Linear(1024, 1)]
        return nn.Sequential(*layers)

    def train_dataset(self) -> Products:
        return Products(170)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        # Each thread adds a part of a sum, so their number decides the last bits of the gradients.
        sums = [weights.abs().sum() for weights in model.parameters()]
        return super().loss(model, batch) + 1e-6 * torch.stack(sums).square().sum()

    def mishap(self) -> None:
        if self.calls == 3:
            threads = Path(self.config.data.own["log"])
            with threads.open("a") as log:
                log.write(torch.__config__.parallel_info())
                log.write(f"{sorted(os.sched_getaffinity(0))} {os.environ['OMP_NUM_THREADS']}\n")
            if self.config.data.own["stop"]:
                os.kill(os.getpid(), signal.SIGTERM)


def new_run(folder: Path, *, stop: bool) -> RunDirectory:
    words = [
        "task=tests.train.runs.test_forked_runs:Threaded", f"data.log={folder / 'threads'}",
        f"data.stop={str(stop).lower()}", "job.cpu=true", "train.steps=5", "train.batch_size=32",
        "train.deterministic=strict",
    ]  # fmt: skip
    folder.mkdir()
    return create(folder / "run", to_yaml(resolve([override_layer(words)])), {"folder": str(ROOT)})


def variables(name: str) -> dict[str, str]:
    # pytest changes its own variable, and conftest.py gives every library one thread.
    inherited = {
        key: text
        for key, text in os.environ.items()
        if not key.endswith("_NUM_THREADS") and key != "PYTEST_CURRENT_TEST"
    }
    return inherited | {"PYTHONPATH": str(ROOT), FORK_SERVER: name}


def attempt(run: RunDirectory, restart: int, name: str, **options: Any) -> tuple[int, str]:
    """Start a task as the local cluster does; return its exit code and output."""
    environ = variables(name) | {
        "HPCRUN_LOCAL_CLUSTER": "1", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart),
        "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "local0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }  # fmt: skip
    task = subprocess.Popen(
        [sys.executable, *RANK, str(run.path)],
        cwd=ROOT, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
    )  # fmt: skip
    output = task.communicate()[0]
    opened = [event for event in read_events(run) if event.tag == "opened"][restart]
    forked = opened.pid != task.pid
    return task.returncode, f"forked: {forked}\n{output}"


def test_forked_ranks_train_to_the_bits_of_fresh_ones(tmp_path: Path) -> None:
    name = f"test-run-{os.getpid()}"
    fresh = new_run(tmp_path / "fresh", stop=False)
    code, output = attempt(fresh, 0, name)
    assert (code, output.splitlines()[0]) == (0, "forked: False"), output
    threads = str(len(os.sched_getaffinity(0)))
    command = fork_server_command(name, parent=os.getpid(), threads=threads, rank=RANK)
    with subprocess.Popen(command, cwd=ROOT, env=variables(name)) as server:
        try:
            until(lambda: answers(name))
            forked = new_run(tmp_path / "forked", stop=True)
            for restart, expected in enumerate((75, 0)):
                code, output = attempt(forked, restart, name)
                assert (code, output.splitlines()[0]) == (expected, "forked: True"), output
        finally:
            server.kill()
    assert final_state(forked) == final_state(fresh)
    logs = [(tmp_path / kind / "threads").read_text() for kind in ("fresh", "forked")]
    assert logs[0] == logs[1]
    assert f"get_num_threads() : {threads}" in logs[0]


@pytest.mark.slow
def test_an_offer_of_a_rank_suffices_for_a_fork(tmp_path: Path) -> None:
    name = f"test-offer-{os.getpid()}"
    run = new_run(tmp_path / "offered", stop=True)
    command = fork_server_command(name, parent=os.getpid())
    with subprocess.Popen(command, cwd=ROOT, env=variables(name)) as server:
        try:
            until(lambda: answers(name))
            code, output = attempt(run, 0, name)
            assert (code, output.splitlines()[0]) == (75, "forked: False"), output
            until(lambda: answers(name))
            code, output = attempt(run, 1, name)
            assert (code, output.splitlines()[0]) == (0, "forked: True"), output
        finally:
            server.kill()
