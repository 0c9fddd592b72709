"""A requeue runs the code that was submitted."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hpcrun.run import snapshot
from hpcrun.run.directory import RunDirectory, RunError, create
from hpcrun.run.files import write_json
from hpcrun.run.record import uncommitted_diff
from hpcrun.run.snapshot import Snapshot, import_folders, snapshot_command, take_snapshot


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


def test_uncommitted_and_new_files_are_copied_ignored_files_not(
    project: Path, run: RunDirectory
) -> None:
    (project / "src" / "task.py").write_text("new")
    (project / "src" / "added é.py").write_text("added")
    (project / "train.py").unlink()
    found = taken(run, project / "src")
    assert names(found) == {".gitignore", "src/task.py", "src/added é.py"}
    assert (found.root / "src" / "task.py").read_text() == "new"
    assert found.copy_of(project / "src") == found.root / "src"
    assert found.copy_of(Path("/etc")) is None
    assert taken(run, project).root != found.root


def taken(run: RunDirectory, folder: Path) -> Snapshot:
    """Take a snapshot, which must give no message."""
    found, words = take_snapshot(run, folder)
    assert words == ""
    assert found is not None
    return found


def names(found: Snapshot) -> set[str]:
    """Return the files and links of the snapshot, by relative path."""
    return {
        str(path.relative_to(found.root))
        for path in found.root.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_the_files_of_a_submodule_are_copied(
    project: Path, run: RunDirectory, tmp_path: Path
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "core.py").write_text("committed")
    (library / ".gitignore").write_text("*.bin\n")
    git(library, "init", "-q")
    git(library, "add", "-A")
    git(library, "commit", "-qm", "first")
    allow = ("-c", "protocol.file.allow=always")
    git(project, *allow, "submodule", "add", "-q", str(library), "src/lib")
    (project / "src" / "lib" / "core.py").write_text("changed")
    (project / "src" / "lib" / "new.py").write_text("new")
    (project / "src" / "lib" / "weights.bin").write_text("ignored")
    found = taken(run, project)
    assert {"src/lib/core.py", "src/lib/new.py"} <= names(found)
    assert "src/lib/weights.bin" not in names(found)
    assert (found.root / "src" / "lib" / "core.py").read_text() == "changed"


def test_links_lead_to_copies_or_to_the_originals(
    project: Path, run: RunDirectory, tmp_path: Path
) -> None:
    outside = tmp_path / "common"
    outside.mkdir()
    (outside / "tool.py").write_text("tool")
    (project / "package").symlink_to("src")
    # Git still lists the files of a folder that has become a link.
    (project / "old").mkdir()
    (project / "old" / "task.py").write_text("old")
    git(project, "add", "-A")
    (project / "old").rename(project / "moved")
    (project / "old").symlink_to("moved")
    (project / "absolute").symlink_to(project / "src")
    (project / "tool.py").symlink_to("../common/tool.py")
    (project / "common").symlink_to(outside)
    (project / "big").symlink_to("data/big.bin")
    (project / "nowhere").symlink_to("not there")
    found = taken(run, project)
    (project / "src" / "task.py").write_text("edited")
    (project / "not there").write_text("by now")
    for name, text in (
        ("package/task.py", "old"),
        ("old/task.py", "old"),
        ("absolute/task.py", "old"),
        ("tool.py", "tool"),
        ("common/tool.py", "tool"),
        ("big", "big"),
        ("nowhere", "by now"),
    ):
        assert (found.root / name).read_text() == text, name
    for name in ("package", "absolute"):
        assert (found.root / name).resolve() == found.root / "src"


def test_ignored_modules_next_to_copied_modules_are_copied(
    project: Path, run: RunDirectory
) -> None:
    with (project / ".gitignore").open("a") as ignore:
        ignore.write("_version.py\n*.so\n*.log\n")
    for name in ("_version.py", "_fast.so", "a.log"):
        (project / "src" / name).write_text("1")
    (project / "data" / "_version.py").write_text("1")
    found = names(taken(run, project))
    assert {"src/_version.py", "src/_fast.so"} <= found
    assert not found & {"src/a.log", "data/_version.py"}


def test_files_with_keys_are_links_to_the_originals(
    project: Path, run: RunDirectory, tmp_path: Path
) -> None:
    private = {".env", "src/prod.env", ".env.local", ".netrc", "id_ed25519", "src/Server.PEM"}
    for name in private:
        (project / name).write_text("s3cret")
    (tmp_path / ".pgpass").write_text("s3cret")
    (project / "passwords").symlink_to(tmp_path / ".pgpass")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "second")
    (project / ".env").write_text("new s3cret")
    (project / "train.py").write_text("new script")
    found = taken(run, project)
    for name in {*private, "passwords"}:
        assert (found.root / name).is_symlink()
        assert "s3cret" in (found.root / name).read_text()
    assert not (found.root / "train.py").is_symlink()
    patch = uncommitted_diff(project / "src")
    assert "new script" in patch
    assert "s3cret" not in patch


def test_runs_and_environments_are_not_copied_from_any_folder(project: Path) -> None:
    (project / ".gitignore").unlink()
    (project / "env").mkdir()
    (project / "env" / "pyvenv.cfg").write_text("home = /usr")
    (project / "other").mkdir()
    other = create(project / "other" / "b", "x", {})
    (other.code / "001").mkdir(parents=True)
    (other.code / "001" / "train.py").write_text("of another run")
    (project / "other" / "mine.py").write_text("mine")
    beside = create(project / "c", "x", {})
    assert names(taken(beside, project)) == {
        *("data/big.bin", "src/task.py", "train.py", "other/mine.py"),
    }


def test_an_error_of_git_is_reported_in_its_words(project: Path, run: RunDirectory) -> None:
    (project / ".git" / "index").write_bytes(b"junk, and more of it")
    with pytest.raises(RunError, match=r"index file .*; correct this, or .* --no-snapshot"):
        take_snapshot(run, project)
    assert not run.code.exists()


def test_another_user_s_work_tree_names_the_trust_command(
    project: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Git's tests use this variable for the same purpose.
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    found, words = take_snapshot(run, project)
    assert found is None
    assert "detected dubious ownership in repository" in words
    assert f"git config --global --add safe.directory '{project}'" in words


def test_a_folder_without_git_has_no_snapshot_and_no_message(tmp_path: Path) -> None:
    run = create(tmp_path / "runs" / "a", "x", {})
    assert take_snapshot(run, tmp_path) == (None, "")


def test_a_repository_beyond_the_limit_is_reported_and_not_copied(
    project: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MOST_FILES", 2)
    found, words = take_snapshot(run, project)
    assert found is None
    assert "has more than 2 files, more than the limit" in words
    monkeypatch.setattr(snapshot, "MOST_FILES", 3)
    monkeypatch.setattr(snapshot, "MOST_BYTES", 4)
    found, words = take_snapshot(run, project)
    assert found is None
    assert "has 0 MiB, more than the limit" in words
    assert not run.code.exists()


def test_a_command_runs_copies_with_the_original_data(project: Path, run: RunDirectory) -> None:
    (project / "data.csv").write_text("1")
    found = taken(run, project)
    command = [sys.executable, "train.py", "--data", "data.csv", "missing.py"]
    words, variables = snapshot_command(found, command, project)
    assert words == [sys.executable, str(found.root / "train.py"), *command[2:]]
    assert variables == {}
    _, variables = snapshot_command(found, [sys.executable, "-m", "src.task"], project)
    assert variables["PYTHONPATH"].split(":")[0] == str(found.root)


def test_modules_come_from_the_copy_despite_pythonpath(
    project: Path, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "script.py").write_text("import task; print(task.__file__)")
    (project / "src" / "task.py").write_text("")
    found = taken(run, project)
    for path in ("src", f"{tmp_path}:{project / 'src'}"):
        monkeypatch.setenv("PYTHONPATH", path)
        words, variables = snapshot_command(found, [sys.executable, "script.py"], project)
        done = subprocess.run(
            words, cwd=project, env={**os.environ, **variables}, check=True, capture_output=True
        )
        assert done.stdout.decode().strip() == str(found.root / "src" / "task.py")
    assert variables["PYTHONPATH"].split(":")[0] == str(tmp_path)


def test_a_script_finds_the_copy_only_if_installed(
    project: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found = taken(run, project)
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    assert snapshot_command(found, ["sh", "run.sh"], project)[1] == {}
    sys.path.append(str(project))
    told = snapshot_command(found, ["sh", "run.sh"], project)[1]
    assert told == {"PYTHONPATH": f"{found.root}:{project}"}


def test_the_folders_of_an_import_hook_contain_its_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = import_folders()
    # The name and the content are those of setuptools.
    finder = ModuleType("__editable___mine_0_1_finder")
    finder.__dict__["MAPPING"] = {
        "mine": "/project/src/mine",
        "of.space": "/project/lib/of/space",
        "single": "/project/one/single.py",
        "renamed": "/project/other",
    }
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    found = [folder for folder in import_folders() if folder not in before]
    assert found == ["/project/src", "/project/lib", "/project/one"]


def test_a_rank_imports_the_copy_despite_pythonpath(project: Path, run: RunDirectory) -> None:
    (project / "src" / "task.py").write_text("")
    found = taken(run, project)
    places = {"root": str(found.root.relative_to(run.path)), "source": str(project)}
    write_json(run.record, {"folder": str(project / "data"), "code": places})
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from hpcrun.run.directory import RunDirectory\n"
        "from hpcrun.train.environment import enter_folder\n"
        "enter_folder(RunDirectory(Path(sys.argv[1])))\n"
        "import task\n"
        "print(Path.cwd(), task.__file__, sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run.path)],
        cwd=project,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", *sys.path])},
        check=True,
        capture_output=True,
    )
    expected = [str(project / "data"), str(found.root / "src" / "task.py")]
    assert done.stdout.decode().splitlines() == expected
