"""The first commands of a newcomer, from the README and the shipped configs."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from tests.support import jobs

ROOT = Path(__file__).parents[1]
MAIN_JOB = ["--nodes", "2", "--gpus", "4", "--cpu", "--executor", "local"]
# Settings that run the tasks of the shipped configs on any machine in seconds.
SMALL = [
    "train.steps=2", "optim.warmup_steps=1", "train.validate_batches=1", "data.max_bytes=300000",
    "model.layers=1", "model.heads=2", "model.width=32", "model.context=32",
]  # fmt: skip


def test_the_main_job_without_a_config_trains_8_ranks(
    tmp_path: Path,
) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    done = jobs.hpcrun("submit", *MAIN_JOB, *SMALL, cwd=tmp_path, env=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 ranks on the CPU over gloo" in done.stdout
    for told in ("validation loss", "unigram entropy"):
        assert re.search(rf"^  {told} +\d\.\d{{4}}$", done.stdout, re.M)
    assert re.search(r"^  sample", done.stdout, re.M)
    run = RunDirectory(tmp_path / "runs" / "quickstart")
    assert (read_json(run.result) or {})["state"] == "finished"


def test_the_script_works_in_a_closed_folder_with_a_blank(tmp_path: Path) -> None:
    clone = tmp_path / "closed folder" / "my hpcrun"
    for name in ("hpcrun", "hydra_plugins", "tools"):
        shutil.copytree(
            ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True
        )
    for name in ("pyproject.toml", "setup.py", "constraints.txt", "README.md"):
        shutil.copy(ROOT / name, clone)
    clone.parent.chmod(0o700)
    # The packages of these tests, so that pip installs only hpcrun.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    (packages,) = (clone / ".venv" / "lib").glob("python*/site-packages")
    (packages / "those-of-the-tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # pip reads "no" as the value of the option without its "no".
    pip = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "no"}
    words = ["--nodes", "1", "--gpus", "1", "--cpu", "--executor", "local", *SMALL]
    done = subprocess.run(
        ["bash", "-c", 'umask 077; exec bash "$@"', "-", clone / "tools" / "quickstart.sh", *words],
        cwd=tmp_path, env={**os.environ, **pip, "HPCRUN_VENV": "", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"result           {clone}/runs/quickstart/result.json\n" in done.stdout
    (activate,) = re.findall(r"^for hpcrun status.* terminal: (.+)$", done.stdout, re.M)
    shown = subprocess.run(
        ["bash", "-c", f"{activate}; command -v hpcrun; hpcrun status quickstart"],
        cwd=clone, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert shown.startswith(f"{clone}/.venv/bin/hpcrun\n")
    assert "finished" in shown


@pytest.mark.slow
def test_the_quick_start_learns_within_minutes(tmp_path: Path) -> None:
    done = jobs.hpcrun("submit", *MAIN_JOB, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDirectory(tmp_path / "runs" / "quickstart")
    report = (read_json(run.result) or {})["report"]
    assert report["validation_loss"] < report["unigram_entropy"] - 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "learnt"),
    [
        ("bdh", lambda report: report["validation_loss"] < report["unigram_entropy"] - 1.0),
        ("autoencoder", lambda report: report["test_loss"] < report["independent_pixels"] - 5.0),
        ("classifier", lambda report: report["test_accuracy"] > 0.95),
    ],
)
def test_a_shipped_config_learns_what_its_comment_says(
    name: str, learnt: Callable[[dict[str, Any]], bool], tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    config = str(ROOT / "configs" / f"{name}.yaml")
    done = jobs.hpcrun(
        "submit", "-c", config, "--executor", "local", "--cpu", cwd=tmp_path, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = (read_json(RunDirectory(tmp_path / "runs" / name).result) or {})["report"]
    assert learnt(report), report
