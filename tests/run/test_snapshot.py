"""The code that a requeue runs is the code that was submitted."""

import subprocess
from pathlib import Path

import pytest

from hpcrun.run import snapshot
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.snapshot import snapshot_command, take_snapshot


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "my project"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "task.py").write_text("old")
    (folder / "train.py").write_text("script")
    (folder / ".gitignore").write_text("data/\nruns/\n")
    (folder / "data").mkdir()
    (folder / "data" / "big.bin").write_text("big")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


@pytest.fixture
def run(project: Path) -> RunDirectory:
    return create(project / "runs" / "a", "x", {})


def test_uncommitted_and_new_files_are_copied_and_ignored_and_deleted_ones_are_not(
    project: Path, run: RunDirectory
) -> None:
    (project / "src" / "task.py").write_text("new")
    (project / "src" / "added é.py").write_text("added")
    (project / "train.py").unlink()
    taken, _ = take_snapshot(run, project / "src")
    assert taken is not None
    copied = {str(path.relative_to(taken.root)) for path in taken.root.rglob("*") if path.is_file()}
    assert copied == {".gitignore", "src/task.py", "src/added é.py"}
    assert (taken.root / "src" / "task.py").read_text() == "new"
    assert taken.copy_of(project / "src") == taken.root / "src"
    assert taken.copy_of(Path("/etc")) is None


def test_each_submission_has_a_snapshot_of_its_own(project: Path, run: RunDirectory) -> None:
    first, _ = take_snapshot(run, project)
    second, _ = take_snapshot(run, project)
    assert first is not None
    assert second is not None
    assert first.root != second.root


def test_a_folder_without_git_has_no_snapshot_and_no_complaint(tmp_path: Path) -> None:
    run = create(tmp_path / "runs" / "a", "x", {})
    assert take_snapshot(run, tmp_path) == (None, "")


def test_a_repository_beyond_the_limit_is_said_and_not_copied(
    project: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MOST_FILES", 2)
    taken, why = take_snapshot(run, project)
    assert taken is None
    assert "3 files" in why
    assert not run.code.exists()


def test_a_command_runs_the_copies_of_its_code_and_the_data_where_it_lies(
    project: Path, run: RunDirectory
) -> None:
    (project / "data.csv").write_text("1")
    taken, _ = take_snapshot(run, project)
    assert taken is not None
    command = ["python", "train.py", "--data", "data.csv", "missing.py"]
    words, variables = snapshot_command(taken, command, project)
    assert words == ["python", str(taken.root / "train.py"), "--data", "data.csv", "missing.py"]
    assert variables == {}
    _, variables = snapshot_command(taken, ["python", "-m", "src.task"], project)
    assert variables["PYTHONPATH"].split(":")[0] == str(taken.root)
