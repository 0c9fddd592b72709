"""The launch scripts count the GPUs of the machine as CUDA does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"

# Prints the command of `hpcrun submit` and of torchrun in place of both.
RECORDER = """
import json, os, sys
words = sys.argv[1:]
if words[:2] in (["-m", "hpcrun"], ["-m", "torch.distributed.run"]):
    print(words, file=sys.stderr)
    print(json.dumps({"run": "runs/x", "config": {}}))
elif words[0].endswith("train_multinode.py"):
    sys.executable, sys.argv = os.environ["PYTHON"], words
    import runpy
    runpy.run_path(words[0], run_name="__main__")
else:
    os.execv(sys.executable, [sys.executable, *words])
"""
CASES = [
    ("3,4,5", (), 3),
    ("", (), 1),
    ("0,1", ("--num_gpus=1",), 1),
    ("0,1", ("--num_gpus", "gpu"), 2),
]


@pytest.mark.parametrize("tool", ["train_dist_torchrun.sh", "train_multinode.sh"])
@pytest.mark.parametrize(("visible", "words", "ranks"), CASES)
def test_a_launch_script_starts_a_rank_per_visible_gpu(
    tmp_path: Path, tool: str, visible: str, words: tuple[str, ...], ranks: int
) -> None:
    recorder, python = tmp_path / "recorder.py", tmp_path / "python"
    recorder.write_text(RECORDER)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {recorder} "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [str(TOOLS / tool), *words, "--config", "a.yaml", "--cpu"],
        env=os.environ | {"PYTHON": str(python), "CUDA_VISIBLE_DEVICES": visible},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *_, launched = done.stderr.splitlines()
    assert f"'--nproc-per-node={ranks}'" in launched
    assert launched.endswith("'-m', 'hpcrun.worker', 'runs/x']")
    assert ("no GPU is visible: 1 rank on the CPU" in done.stdout) == (not visible)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--num_nodes=2",), "--master_addr is missing: give the name or address of node 0"),
        (("--node_rank=1",), "--node_rank 1 is not below --num_nodes 1; nodes count from 0"),
        (("--num_gpus=some",), "--num_gpus some: give the ranks of this host, or omit the option"),
        (("--master_port=70000",), "--master_port 70000: a port is 1 to 65535; 29500 is usual"),
        (("--config=none.yaml",), "none.yaml: "),
    ],
)
def test_an_option_that_cannot_work_is_one_line(
    tmp_path: Path, words: tuple[str, ...], line: str
) -> None:
    done = subprocess.run(
        [str(TOOLS / "train_multinode.sh"), "--num_gpus=1", *words],
        env=os.environ | {"PYTHON": sys.executable},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    (told,) = done.stderr.splitlines()
    assert told.startswith(f"hpcrun: {line}")
    assert not [*tmp_path.iterdir()]


def test_an_option_without_its_number_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(TOOLS / "train_dist_torchrun.sh"), "--num_gpus"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hpcrun: --num_gpus needs a number, such as --num_gpus 4\n"
