"""The first commands of a newcomer, from the README and the shipped configs."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from tests import jobs

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
