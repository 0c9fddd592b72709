"""`hpcrun estimate`: its peaks against those of real steps, its answers, and its refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpcrun.errors import UserError
from hpcrun.estimate.result import GIB, gpu_memory
from hpcrun.estimate.spares import spare_nodes
from tests.support.start_server import COMMANDS, prepared

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs"

USERS_TASK = """
import torch
from torch import nn
import hpcrun

class Half(hpcrun.Task):
    def build_model(self):
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
        assert model[0].weight.abs().max() > 0, "needs numbers"
        return model

    def train_dataset(self):
        return torch.utils.data.TensorDataset(torch.zeros(64, 512))

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

class Chooses(Half):
    def loss(self, model, batch):
        value = model(batch[0]).square().mean()
        return value * 2 if value > 1 else value

class Wrong(Half):
    def loss(self, model, batch):
        return model(batch[0][:, :3]).sum()

class Lazy(Half):
    def train_dataset(self):
        class Files(torch.utils.data.Dataset):
            def __len__(self):
                return 64
            def __getitem__(self, index):
                return torch.load(f"absent/{index}.pt")
        return Files()

class Exits(Half):
    def train_dataset(self):
        raise SystemExit(2)
"""


def program(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=prepared(
            {
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{folder}",
                "XDG_CACHE_HOME": str(folder),
                COMMANDS: "1",
            }
        ),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_peak_is_within_a_tenth_of_real_steps(tmp_path):
    done = program(tmp_path, "-m", "tests.estimate.peaks", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    peaks = json.loads(done.stdout.splitlines()[-1])
    assert len(peaks) == 16
    off = {case: estimated / real - 1 for case, (real, estimated) in peaks.items()}
    assert max(map(abs, off.values())) < 0.1, off


def estimate(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "users.py").write_text(USERS_TASK)
    return program(folder, "-m", "hpcrun", "estimate", *words)


def test_a_model_that_needs_numbers_is_built_with_advice(tmp_path):
    words = ["task=users:Half", "train.batch_size=20000", "--gpu-memory", "2.2GiB", "--json"]
    done = estimate(tmp_path, *words)
    assert done.returncode == 1, done.stderr
    assert "needs real memory" in done.stderr
    found = json.loads(done.stdout)
    assert not found["fits"]
    assert found["time"] is None
    assert found["remarks"][0].startswith("no time of a step: it is known for --gpu a100-40, ")
    assert found["parts"]["weights"] == 4 * (512 * 512 + 512) * 4
    assert sum(found["parts"].values()) == found["peak"]
    assert found["advice"][0].startswith("a smaller train.micro_batch ")


def test_a_range_of_nodes_is_estimated_for_the_smallest_number(tmp_path):
    words = ["task=users:Half", "train.batch_size=60", "train.parallel=fsdp", "--gpu", "h100"]
    shape_words = ["--nodes", "2-4", "--gpus", "2", "--json"]
    done = estimate(tmp_path, *words, *shape_words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Of 8 ranks, one has 8 samples; 4 ranks with 15 samples take two micro-batches of at most 8.
    shape = [found[key] for key in ("nodes", "ranks", "micro_batch", "accumulation")]
    assert shape == [2, 4, 8, 2]
    # By the memory, and then by NCCL's latency.
    assert (found["reshards"], found["shard"]) == (False, "full")
    assert "fsdp.reshard_after_forward=auto chooses false: all weights" in done.stderr
    assert found["parts"]["weights"] == (512 * 512 + 512) * 4
    words += ["fsdp.reshard_after_forward=true", "fsdp.shard=full"]
    freed = json.loads(estimate(tmp_path, *words, *shape_words).stdout)
    assert freed["peak"] < found["peak"]


def test_packed_documents_need_no_mask_and_no_data(tmp_path):
    words = ["task=language-model", "data.tokens=[tokens.bin]", "model.vocabulary=9000", "--json"]
    words += ["model.context=4096", "train.batch_size=2", "--gpu", "h100", "--gpus", "1"]
    without = estimate(tmp_path, *words, "model.document_end=0")
    assert "tokens.bin: cannot be read" in without.stderr
    assert "the estimate is with samples of zeros" in without.stderr
    np.arange(9000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    packed, plain = json.loads(without.stdout), json.loads(estimate(tmp_path, *words).stdout)
    for key in ("parts", "fits", "flops", "time", "remarks"):
        assert packed[key] == plain[key]


def test_a_task_without_data_has_weights_and_gradients(tmp_path):
    done = estimate(tmp_path, "task=users:Lazy", "--gpu", "h100", "--json")
    assert done.returncode == 0, done.stderr
    assert "no data (FileNotFoundError: " in done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] is None
    assert found["parts"]["rest"] == found["parts"]["weights"] == 4 * (512 * 512 + 512) * 4
    assert found["remarks"] == [
        "no time of a step: there are no data to count the FLOPs of a sample; set the task's flops_per_sample"
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "name the GPU: --gpu h100"),
        (["--gpu", "h1000"], "did you mean h100?"),
        (["--gpu-memory", "many"], "many is not a size"),
        (["--gpu", "h100", "task=absent:Task"], "absent"),
        (["--gpu", "h100", "task=users:Wrong"], "the fake run raised RuntimeError"),
        (["--gpu", "h100", "task=users:Chooses"], "the step depends on the values of its data"),
        (
            ["--gpu", "h100", "fsdp.cpu_offload=true", "train.parallel=fsdp"],
            "the GPU's memory only",
        ),
        (["--gpu", "h100", "task=users:Exits"], "the fake run raised SystemExit: 2"),
        (["--gpu", "h100", "--failure-rate", "0"], "--failure-rate: 0 is not between 0 and 1"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, words, line):
    done = estimate(tmp_path, *words)
    assert done.returncode == 2
    assert line in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("nodes", "spares", "share", "hours"),
    [
        (8, 1, 0.11, 88),
        (32, 1, 0.030, 6.0),
        (128, 2, 0.015, 46 / 60),
        (512, 4, 0.008, 6 / 60),
        (2048, 13, 0.006, 70 / 3600),
    ],
)
def test_spare_nodes_cost_and_pay_as_documented(nodes, spares, share, hours):
    found = spare_nodes(nodes)
    assert found.spares == spares
    assert found.share == pytest.approx(share, rel=0.06)
    # The table of docs/spares.md has the difference of both restarts without the queue.
    saved = found.requeue - found.replacement
    assert found.queue == pytest.approx(max(0.0, 3600 * hours - saved), rel=0.03)
    assert (PAGE / "spares.md").read_text().count(f"| {nodes} | ") == 1


def test_spares_and_start_up_change_the_figures():
    found = spare_nodes(32, failures=0.01, start_up=120.0, spares=3)
    assert (found.spares, found.share) == (3, pytest.approx(3 / 35))
    assert (found.requeue, found.replacement) == (540.0, 130.0)
    assert found.queue == pytest.approx(3600 * (3 / 35) / 0.32 - 410)


def test_two_lines_say_what_spares_cost(tmp_path):
    words = ["task=users:Half", "train.batch_size=64", "--gpu", "h100", "--nodes", "32"]
    done = estimate(tmp_path, *words, "--spares", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "2 spare nodes for 32: 5.9% of the node hours, 0.12 failures in 24 h",
        "a failure costs 1m with a spare node, without one 8m and the queue: spares pay with a queue of "
        "11h31m or more",
    ]


def test_sizes_and_names():
    assert gpu_memory(None, "80GiB") == gpu_memory(None, "80") == 80 * GIB
    assert gpu_memory(None, "80 GB") == 80 * 10**9
    assert gpu_memory("H200", None) > gpu_memory("h100", None)
    with pytest.raises(UserError):
        gpu_memory(None, "0GiB")
