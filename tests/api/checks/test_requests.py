"""A file in the place of an override, and the default name of a command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hpcrun.api.submission.choose_config import default_name
from hpcrun.api.submission.requests import how_to_submit


@pytest.mark.parametrize(
    ("name", "text", "runs", "remedy"),
    [
        ("train.py", "", False, "-- python train.py"),
        ("go.sh", "echo", False, "-- bash go.sh"),
        ("go", "echo", True, "-- ./go"),
        ("sums.pl", "", True, "-- perl sums.pl"),
        ("raw.sh", "#SBATCH -N 2\nsrun python t.py\n", False, "submit --nodes 2 -- python t.py"),
        ("raw.slurm", "#SBATCH --ntasks-per-node=4\nmodule load x\n", True, "--gpus 4 -- COMMAND"),
        (
            "raw.sh",
            "#SBATCH -c4 --qos=a\nmpirun -np 2 python t.py",
            False,
            "--qos a -- python t.py",
        ),
    ],
)
def test_a_file_gets_the_right_remedy(
    name: str,
    text: str,
    runs: bool,
    remedy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    Path(name).chmod(0o755 if runs else 0o644)
    assert how_to_submit(Path(name)).endswith(remedy)
    assert ("sbatch" in how_to_submit(Path(name))) == ("#SBATCH" in text)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("perl sums.pl 3", "sums"),
        ("/usr/bin/perl -w sums.pl", "sums"),
        ("env A=1 Rscript fit.R", "fit"),
        ("julia model", "model"),
        ("solver fit.R", "fit"),
        ("solver data.csv", "solver"),
        ("./solve data.csv", "solve"),
        ("/bin/true data.csv", "true"),
        ("python -u train.py sums.pl", "train"),
        ("bash -c 'torchrun train.py'", "train"),
    ],
)
def test_a_run_is_named_after_its_script(
    line: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("sums.pl", "fit.R", "model", "data.csv", "solve"):
        Path(file).touch()
    assert default_name(None, shlex.split(line), "x", "after --")[0] == name
