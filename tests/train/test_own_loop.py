"""The script of docs/own-loop.md runs, and survives disturbances as the page says."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train import gan

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own-loop.md"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Return the page's script as a file."""
    (text,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    path = tmp_path_factory.mktemp("own-loop") / "add.py"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def played(script, tmp_path_factory):
    """Return the folder with the program's results."""
    folder = tmp_path_factory.mktemp("disturbed")
    subprocess.run(
        [sys.executable, "-m", "tests.train.own_loops", str(script), str(folder)],
        cwd=ROOT, timeout=600, check=True,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def disturbed(played):
    """Return the exit codes and rank 0's first and last lines of a part of a disturbed run."""
    codes = json.loads((played / "codes.json").read_text())

    def part(name):
        lines = (played / name / "rank-0.log").read_text().splitlines()
        return codes[name], lines[0], lines[-1]

    return part


def undisturbed(script, launcher, folder):
    """Return the first and the last line of the script, started as the page says."""
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return lines[0], lines[-1]


def test_one_rank_killed_and_stopped_ends_with_the_undisturbed_weights(script, disturbed, tmp_path):
    first, weights = undisturbed(script, (), tmp_path)
    assert first == "one process, from step 0"
    assert re.fullmatch(r"weights [0-9a-f]{16}", weights)
    assert disturbed("alone-0")[0] == [-signal.SIGKILL]
    codes, first, last = disturbed("alone-1")
    assert (codes, first) == ([75], "one process, from step 100")
    assert last.startswith("step 150:")
    assert disturbed("alone-2") == ([0], "one process, from step 150", weights)


def test_with_torchrun_a_killed_rank_and_a_signal_to_one_rank_change_no_bit_either(
    script, disturbed, tmp_path
):
    first, weights = undisturbed(script, TORCHRUN, tmp_path)
    assert first == "2 ranks, from step 0"
    codes, _, _ = disturbed("two-0")
    assert codes[0] == -signal.SIGKILL
    assert codes[1] > 0
    codes, first, _ = disturbed("two-1")
    assert (codes, first) == ([75, 75], "2 ranks, from step 100")
    # Both ranks stopped one step later, after their agreement.
    assert disturbed("two-2") == ([0, 0], "2 ranks, from step 151", weights)


@pytest.fixture(scope="module")
def beside(played):
    """Return the results of both ranks."""
    assert json.loads((played / "codes.json").read_text())["beside"] == [0, 0]
    return [json.loads((played / f"beside-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_trainers_with_coupled_losses_train_as_plain_torch(beside, parallel):
    for found in beside:
        torch.testing.assert_close(torch.tensor(found[parallel]["gan"]), gan.by_hand())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_several_ranks_without_a_wrapped_model_are_refused_a_step(beside, parallel):
    for found in beside:
        assert "2 ranks would each train a separate model" in found[parallel]["step"]
        assert "wrap_model() before training_step()" in found[parallel]["step"]


def test_an_optimizer_made_before_sharding_is_refused(beside):
    for found in beside:
        for asked in ("optimizer", "load", "whole"):
            assert "call setup_distributed() and wrap_model() before" in found["fsdp"][asked]
            assert found["ddp"][asked] is None


@pytest.fixture(scope="module")
def own_group(played):
    """Return the results of two ranks of a program that creates its process group."""
    assert json.loads((played / "codes.json").read_text())["own"] == [0, 0]
    return [json.loads((played / f"own-{rank}.json").read_text()) for rank in range(2)]


def test_ranks_of_a_group_that_the_program_made_train_one_model(own_group):
    first, second = own_group
    assert first["weights"] == second["weights"]
    assert [found["place"] for found in own_group] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert [found["main"] for found in own_group] == [True, False]
    assert first["method"] == ["spawn", "gloo"]
    assert first["saved"]
    assert second["saved"]


@pytest.mark.parametrize("asked", ["early wrap", "early step", "early setup"])
def test_a_trainer_older_than_the_process_group_is_refused(own_group, asked):
    told = own_group[1][asked]
    assert "rank 1 of 2 in its process group, but rank 0 of 1 in its DistributedConfig" in told
    assert "make the group before the trainer" in told


def test_a_group_with_other_rank_numbers_than_the_launcher_is_refused(own_group):
    told = own_group[0]["crossed"]
    assert "the process group says rank 0 of 2, and torchrun says rank 1 of 2" in told
    assert "give init_process_group the launcher's rank and world_size" in told
