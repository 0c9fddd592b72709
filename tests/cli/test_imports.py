"""Submitting never imports packages that only training or reporting needs (invariant 7)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun.__main__ import run

HEAVY = {"torch", "numpy", "h5py", "matplotlib", "scipy", "rich", "pandas"}


def imported(folder: Path, *words: str) -> set[str]:
    """Return the modules and packages that ``python -m WORDS`` imports, from Python's import log."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}:{folder}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    names = {line.rpartition("|")[2].strip() for line in lines}
    assert "hpcrun" in names
    return names | {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    "words",
    [
        ["hpcrun.submit", "--dry-run"],
        ["hpcrun.submit", "--nodes", "2", "--gpus", "4", "--dry-run", "--json"],
        ["hpcrun", "--help"],
        ["hpcrun", "config", "show"],
        ["hpcrun", "status"],
    ],
)
def test_what_does_not_train_imports_nothing_heavy(tmp_path: Path, words: list[str]) -> None:
    assert not imported(tmp_path, *words) & HEAVY


def test_a_dry_run_imports_only_what_it_needs(tmp_path: Path) -> None:
    words = ["hpcrun.submit", "--dry-run", "--executor", "local"]
    assert not imported(tmp_path, *words) & {"submitit", "psutil"}


def test_a_submission_hands_over_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; import hpcrun; import hpcrun.cli.commands.submit, hpcrun.cli.follow;"
        "import hpcrun.slurm.local.submission, hpcrun.slurm.launch.executor, hpcrun.worker;"
        f"sys.exit(', '.join(set(sys.modules) & {HEAVY - {'numpy'}!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stderr.strip() == ""


class Interrupting:
    """A finder of modules that behaves as if Ctrl-C came during the import of the program."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "hpcrun.cli.main":
            raise KeyboardInterrupt


def test_ctrl_c_during_the_imports_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hpcrun.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        run("status")
    assert ended.value.code == 130


def test_modules_of_the_working_folder_replace_none_of_python(tmp_path: Path) -> None:
    for name in ("argparse", "queue", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the working folder')\n")
    command = [sys.executable, "-m", "hpcrun", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    # A program of the user keeps its own folder.
    code = "import sys; before = sys.path[:]; import hpcrun; assert sys.path == before"
    (tmp_path / "mine.py").write_text(code)
    subprocess.run([sys.executable, "-m", "mine"], cwd=tmp_path, check=True)
