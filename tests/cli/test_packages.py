"""The submitting command reports a missing package before the job is queued."""

import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun.api.submission.choose_config import require_packages
from hpcrun.cli.main import guarded
from hpcrun.config import override_layer, resolve
from hpcrun.errors import UserError


@pytest.mark.parametrize("how", [["--executor", "local"], ["--executor", "slurm", "--dry-run"]])
def test_a_missing_logger_package_is_reported_before_anything_is_created(
    how: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    line = ["submit", *how, "--cpu", "--runs-dir", str(tmp_path / "runs"), "watch.tensorboard=true"]
    assert guarded(line) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "watch.tensorboard: the package tensorboard is not installed here; `pip install" in told
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_wandb_leaves_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match=r"^watch.wandb: the package wandb is not installed here"):
        require_packages(resolve([override_layer(["watch.wandb=a"])]))


def test_nothing_is_said_of_packages_that_the_ranks_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    for elsewhere in ("job.container=[x]", "job.python=/opt/python", "job.setup=[module load x]"):
        require_packages(resolve([override_layer(["watch.wandb=a", elsewhere])]))


def test_a_command_without_its_packages_gets_a_line(tmp_path: Path) -> None:
    program = "import sys; sys.modules['xxhash'] = None; from hpcrun.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "status"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("hpcrun: status: the package xxhash is not installed here; `pip install")
    assert line.endswith("run the command on another host: hpcrun --host HOST status")
