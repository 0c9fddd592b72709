"""tools/test.sh works in any folder, and .ci/run tries it in a difficult one."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# In place of tools/test.sh.
SHOWS = """\
cd "$(dirname "$0")/.."
echo "ran in $PWD, umask $(umask), with" "$@"
echo "modes $(stat -c %a ../.. .. . train.py | xargs), slurm ${HPCRUN_REQUIRE_SLURM:-}, venv ${HPCRUN_VENV:-}"
echo "found" *
exit 3
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout that only its owner can read, in a folder with a blank in its name."""
    folder = tmp_path / "closed folder" / "project"
    for name in ("tools", ".ci", "runs", ".venv", "env"):
        (folder / name).mkdir(parents=True)
    for name in ("readable_copy.sh", "environment.sh"):
        shutil.copy(ROOT / "tools" / name, folder / "tools")
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    shutil.copy(ROOT / ".gitignore", folder)
    (folder / "tools" / "test.sh").write_text(SHOWS)
    (folder / "train.py").touch(mode=0o600)
    (folder / "env" / "pyvenv.cfg").touch()
    (folder / "runs" / "run").touch()
    folder.chmod(0o700)
    folder.parent.chmod(0o700)
    return folder


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can read."""
    folder = Path(tempfile.mkdtemp(prefix="hpcrun-tests-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def shell(text: str, cwd: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run ``text`` after tools/readable_copy.sh."""
    program = f". {shlex.quote(str(ROOT / 'tools' / 'readable_copy.sh'))}\nset -eu\n{text}"
    # The variables are those of a run of these tests too.
    clean = {name: text for name, text in os.environ.items() if not name.startswith("HPCRUN_")}
    return subprocess.run(
        ["bash", "-c", program],
        cwd=cwd, env=clean | environ, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_closed_folder_or_a_blank_needs_a_copy(project: Path, open_folder: Path) -> None:
    ask = "needs_copy || echo no"
    reason = f"the path {project} has a blank or another special character\n"
    assert shell(ask, project).stdout == reason
    assert shell(ask, open_folder).stdout == "no\n"
    (open_folder / "runs").mkdir(mode=0o700)
    (open_folder / "train.py").touch()
    assert shell(ask, open_folder).stdout == "no\n"
    (open_folder / "train.py").chmod(0o600)
    root = os.geteuid() == 0
    expected = f"other users cannot read {open_folder}\n" if root else "no\n"
    assert shell(ask, open_folder).stdout == expected
    (open_folder / "train.py").chmod(0o644)
    (open_folder / "closed").mkdir()
    shutil.copytree(open_folder, open_folder / "closed" / "inner", ignore=lambda *_: ["closed"])
    (open_folder / "closed").chmod(0o700)
    inner = open_folder / "closed" / "inner"
    expected = f"other users cannot read {inner}\n" if root else "no\n"
    assert shell(ask, inner).stdout == expected


def test_every_user_can_read_the_copy(project: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    run = 'umask 077; run_in_copy "reason" a "b  c"'
    done = shell(run, project, HPCRUN_TEST_COPY=str(copy), HPCRUN_VENV="env")
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == [
        f"reason: the tests run in a copy, {copy}",
        f"ran in {copy}, umask 0022, with a b  c",
        f"modes {oct(tmp_path.parent.stat().st_mode)[-3:]} 700 755 644, slurm , venv ",
        "found tools train.py",
    ]
    (copy / ".venv").mkdir()
    (project / "train.py").rename(project / "other.py")
    done = shell(run, project, HPCRUN_TEST_COPY=str(copy))
    assert done.stdout.endswith("found other.py tools\n")
    assert (copy / ".venv").is_dir()


def test_a_copy_of_another_user_is_refused(project: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tools" / "test.sh", project / "tools")
    copy = tmp_path / "copy"
    copy.symlink_to(tmp_path)
    done = shell("bash tools/test.sh", project, HPCRUN_TEST_COPY=str(copy))
    assert done.returncode == 2
    assert done.stderr.startswith(f"{copy} belongs to another user: remove it, or set ")
    assert not (tmp_path / "tools").exists()


def test_ci_runs_the_tests_in_a_closed_folder(project: Path) -> None:
    done = shell("bash .ci/run a 'b  c'", project)
    assert done.returncode == 3, done.stderr
    ran, modes, found = done.stdout.splitlines()
    place = Path(ran.removeprefix("ran in ").split(", umask ")[0])
    assert ran.endswith("/closed folder/hpcrun, umask 0077, with a b  c")
    required = "1" if os.geteuid() == 0 else ""
    assert modes == f"modes 711 700 700 600, slurm {required}, venv "
    assert found == "found tools train.py"
    assert not place.parents[1].exists()


@pytest.mark.parametrize("given", ["", "my env", "/absolute"])
def test_the_environment_is_found_from_any_folder(given: str, project: Path) -> None:
    given = str(project.parent / "absolute") if given.startswith("/") else given
    venv = project / (given or ".venv")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, project)
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    text = """. tools/environment.sh
    echo "dev $(cat pyproject.toml constraints.txt | cksum) $PWD" >"${HPCRUN_VENV:-.venv}/.hpcrun-installed"
    hpcrun_environment dev
    command -v python"""
    done = shell(text, project, HPCRUN_VENV=given)
    assert (done.stdout, done.stderr) == (f"{venv}/bin/python\n", "")
