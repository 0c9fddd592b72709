"""An error is reported once, at the user's line, and a resume reports changed code."""

import re
import subprocess
from pathlib import Path

import pytest

from hpcrun.cli.main import guarded
from hpcrun.run.directory import RunDirectory
from tests.cli.conftest import tiny_config
from tests.support import jobs

WITHOUT_DATA = """
import torch
from probe import Probe

class Img(Probe):
    def train_dataset(self):
        return torch.load("/data/imagenet/train.pt")
"""


@pytest.fixture
def project(folder: Path) -> Path:
    """A git work tree to submit from."""
    (folder / ".gitignore").write_text("runs/\n")
    (folder / "img.py").write_text(WITHOUT_DATA)
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)
    return folder


def test_a_missing_file_ends_the_run_at_the_users_line(project: Path) -> None:
    line = ["submit", "-c", "empty.yaml", "--name", "img", *tiny_config(project, task="img:Img")]
    done = jobs.hpcrun(*line, cwd=project)
    assert done.returncode == 2, done.stdout + done.stderr
    run = RunDirectory(project / "runs" / "img")
    assert [event.cause for event in jobs.events(run, "ended")] == ["bad-input"]
    place = f"{project}/img.py:7"
    told = re.search(r"^hpcrun: img failed: rank \d on local0: (.+)$", done.stdout, re.M)
    assert told is not None
    assert told[1].startswith("FileNotFoundError: [Errno 2] No such file or directory: ")
    assert f" at {place}; " in told[1]
    assert "hpcrun/train/" not in done.stdout
    assert f'    |   File "{project}/img.py", line 7, in train_dataset' in done.stdout
    copy = run.code / "001" / "img.py"
    assert f"  copy  {copy}:7 (" in done.stdout
    assert copy.stat().st_mode & 0o222 == 0


def prepare(project: Path, *more: str) -> int:
    """Submit without a job, once per call."""
    line = ["submit", "-c", "empty.yaml", "--name", "img", "--prepare", "task=img:Img", *more]
    return guarded(line)


def test_code_changed_since_the_previous_submission_is_reported(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    assert [prepare(project), prepare(project)] == [0, 0]
    assert "changed" not in capsys.readouterr().err
    (project / "img.py").write_text(WITHOUT_DATA + "x = 1\n")
    assert prepare(project) == 0
    line = "hpcrun: img: changed since the previous submission: img.py; the run continues"
    assert line in capsys.readouterr().err


def test_options_that_only_slurm_understands_are_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    line = ["submit", "--executor", "local", "--dry-run", "task=img:Img"]
    assert guarded([*line, "--partition", "gpu", "job.qos=high"]) == 0
    told = "hpcrun: --partition, job.qos: no effect on this machine (job.executor is local)\n"
    assert capsys.readouterr().err == told
    assert guarded(line) == 0
    assert capsys.readouterr().err == ""
