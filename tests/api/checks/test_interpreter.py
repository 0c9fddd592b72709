"""The interpreter of a command is asked for the packages that its script imports."""

import sys
from pathlib import Path

import pytest

from hpcrun.api.submission.checks.concern import Submission
from hpcrun.api.submission.checks.interpreter import missing_packages
from hpcrun.config import Config


def lines(folder: Path, **job: object) -> list[str]:
    """Return what the check says of ``train.py``."""
    config = Config(command=[sys.executable, "train.py"], job=job)  # type: ignore[arg-type]
    return [found.text for found in missing_packages(Submission(config, folder))]


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("import os, zebra_net\n", "zebra_net"),
        ("from zebra_net.layers import Head\nimport zebra_data as z\n", "zebra_net and zebra_data"),
        ("import torch, os.path\nfrom pathlib import Path\n", None),
        ("import helper\nfrom . import other\n", None),
        ("try:\n    import zebra_net\nexcept ImportError:\n    zebra_net = None\n", None),
        ("def late():\n    import zebra_net\n", None),
        ("import sys\nsys.path.insert(0, 'lib')\nimport zebra_net\n", None),
        ("import zebra_net(\n", None),
    ],
)
def test_a_missing_package_is_named_before_the_start(
    tmp_path: Path, text: str, missing: str | None
) -> None:
    (tmp_path / "helper.py").touch()
    (tmp_path / "train.py").write_text(text)
    found = lines(tmp_path)
    assert bool(found) == (missing is not None)
    assert all(
        f"train.py imports {missing}, and {sys.executable} has no such" in one for one in found
    )


@pytest.mark.parametrize(
    "job",
    [
        {"setup": ["module load ml"]},
        {"env": {"PYTHONPATH": "/opt/lib"}},
        {"image": "a.sif"},
        {"srun_args": ["--container-image=nvcr.io#nvidia/pytorch:25.01-py3"]},
        {"sbatch_args": ["--container /opt/bundle"]},
    ],
)
def test_another_environment_of_the_job_is_not_judged(
    tmp_path: Path, job: dict[str, object]
) -> None:
    (tmp_path / "train.py").write_text("import zebra_net\n")
    assert lines(tmp_path, **job) == []
