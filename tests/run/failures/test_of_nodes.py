"""Errors of missing files and modules that another start may not give."""

import os
from pathlib import Path

import pytest

from hpcrun.errors import UserError
from hpcrun.run.failures import of_nodes
from hpcrun.run.failures.mistakes import is_mistake, may_pass_by_cause, passing
from hpcrun.run.failures.of_nodes import folders_of_program, module_may_return, path_may_return

NONE = "FileNotFoundError: [Errno 2] No such file or directory: '{}'"
SHUT = "PermissionError: [Errno 13] Permission denied: '{}'"


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a disk of the node, a mount point without its file system, and files."""
    monkeypatch.setattr(of_nodes, "_LOCAL", (str(tmp_path / "tmp"),))
    for name in ("TMPDIR", "SLURM_TMPDIR", "LOCAL_SCRATCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name in ("tmp/mine", "mount", "data", "bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "data" / "a.pt").write_text("x")
    for name, interpreter in (("good", "/bin/sh"), ("bad", "/no/sh")):
        (tmp_path / "bin" / name).write_text(f"#!{interpreter}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "name", "reason"),
    [
        # The file server answers again.
        (NONE, "data/a.pt", "time"),
        ("python: can't open file '{}': [Errno 2] No such file or directory", "data/a.pt", "time"),
        (SHUT, "data/a.pt", "time"),
        (NONE, "bin/good", "time"),
        # A mistyped name, a missing interpreter, a program without the right to run.
        (NONE, "data/b.pt", ""),
        (NONE, "bin/bad", ""),
        (SHUT, "bin/good", ""),
        ("ValueError: no images in {}", "data", ""),
        # The node's own disk.
        (NONE, "tmp/staged/a.pt", "node"),
        (NONE, "tmp/mine/a.pt", ""),
        # One name is there, the other is not.
        ("FileNotFoundError: [Errno 2] No such file or directory: '{}' -> '/no/b'", "data/a.pt", ""),
        ("bash: {}: No such file or directory", "data/a.pt", "time"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'a.pt'{0:.0}", "data", ""),
    ],
)  # fmt: skip
def test_the_disk_shows_if_a_file_may_return(
    disk: Path, words: str, name: str, reason: str
) -> None:
    assert path_may_return(words.format(str(disk / name))) == reason


def test_an_empty_mount_point_is_of_the_node(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, root = Path.stat, Path("/").stat()

    def stat(path: Path, **more: bool) -> os.stat_result:
        found = real(path, **more)
        # As root's folder of the root file system.
        return root if path == disk / "mount" else found

    missing = NONE.format(disk / "mount" / "imagenet" / "a.pt")
    monkeypatch.setattr(Path, "stat", stat)
    assert path_may_return(missing) == "node"
    assert path_may_return(f"FileNotFoundError: no class folder in {disk}/mount.") == "node"
    refusal = UserError(f"data.path: there is nothing at {disk}/mount/imagenet; correct it")
    assert passing(refusal) == "node"
    (disk / "mount" / "other").mkdir()
    assert (path_may_return(missing), passing(refusal)) == ("", "")


def test_a_cache_of_another_user_is_of_the_node(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 77 + os.getuid())
    (disk / "tmp" / "mine").chmod(0o755)
    os.chown(disk / "tmp" / "mine", 78, -1) if os.getuid() == 0 else None
    assert path_may_return(SHUT.format(disk / "tmp" / "mine" / "cache")) == "node"


def test_a_file_system_without_an_answer_is_no_mistake(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object, **__: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "stat", stale)
    assert path_may_return(NONE.format(disk / "data" / "b.pt")) == "node"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("ModuleNotFoundError: No module named 'there'", True),
        ("ModuleNotFoundError: No module named 'there.core'", True),
        ("python: No module named there", True),
        ("ModuleNotFoundError: No module named 'absent'", False),
        ("ModuleNotFoundError: No module named 'there.absent'", False),
        ("ModuleNotFoundError: No module named 'there.core'; 'there' is not a package", False),
    ],
)
def test_a_module_that_is_there_again_is_no_mistake(
    tmp_path: Path, words: str, found: bool
) -> None:
    packages = tmp_path / "env" / "lib" / "python3.12" / "site-packages"
    (packages / "there").mkdir(parents=True)
    (packages / "there" / "__init__.py").touch()
    (packages / "there" / "core.cpython-312-x86_64-linux-gnu.so").touch()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    command = [str(tmp_path / "env" / "bin" / "python"), "train.py"]
    assert module_may_return(words, folders_of_program(command, "", "")) is found
    trace = f'File "{packages}/torch/nn.py", line 3'
    assert module_may_return(words, folders_of_program(["python"], trace, "")) is found


class LocalEntryNotFoundError(FileNotFoundError):
    """The error of a hub's client that finds neither the server nor a copy."""


def after(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason", "mistake"),
    [
        (LocalEntryNotFoundError("please check your connection and try again"), "time", False),
        (after(ImportError("a is needed"), ConnectionResetError(104, "reset")), "time", False),
        (after(NameError("name 'a' is not defined"), KeyError("a")), "", True),
        (after(FileNotFoundError(2, "No such file", "/no/a"), TimeoutError("timed out")), "time", False),
        (ModuleNotFoundError("No module named 'json'", name="json"), "time", False),
        (ModuleNotFoundError("No module named 'no_such'", name="no_such"), "", True),
        (NameError("name 'connection' is not defined"), "", True),
        (FileNotFoundError(2, "No such file or directory"), "", False),
        (SyntaxError("source code string cannot contain null bytes"), "", False),
        (ImportError("/me/x.so: file too short"), "", False),
    ],
)  # fmt: skip
def test_an_error_after_a_lost_server_is_no_mistake(
    error: BaseException, reason: str, mistake: bool
) -> None:
    assert (passing(error), is_mistake(error)) == (reason, mistake)


@pytest.mark.parametrize(
    ("cause", "passes"),
    [
        (ConnectionError("HTTPSConnectionPool(host='h'): Max retries exceeded"), True),
        (OSError(116, "Stale file handle", "/data/a"), True),
        (RuntimeError("CUDA error: unknown error"), True),
        (ImportError("libcudart.so.12: cannot open shared object file"), True),
        (ModuleNotFoundError("No module named 'no_such'", name="no_such"), False),
        (FileNotFoundError(2, "No such file or directory", "/no/a"), False),
        (ValueError("bad 'connection'"), False),
    ],
)
def test_a_refusal_passes_with_its_cause(cause: Exception, passes: bool) -> None:
    assert may_pass_by_cause(after(UserError("task: a:B: the constructor raised"), cause)) is passes
