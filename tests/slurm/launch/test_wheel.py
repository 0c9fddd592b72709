"""An installed package contains what its commands, messages and documentation name."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrun.cli.main import COMMANDS
from tests.support.pages import PACKAGE
from tests.support.wheels import ROOT, installed_wheel

CITED = re.compile(
    r"\b(?:docs|configs|sbatch|examples|tools)/[\w/.-]*\w\.(?:md|yaml|sbatch|py|sh)\b"
)
# Measured in a checkout; no user needs it.
OF_DEVELOPERS = {"tools/bench/checkpoint.py"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip has installed a wheel of this checkout."""
    return installed_wheel(tmp_path_factory.mktemp("wheel"))


def python(
    installed: Path, program: str, *words: str, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run a program with the installed package outside the checkout."""
    # First on the path, also where a .pth file of the environment puts the checkout first.
    first = f"import sys; sys.path.insert(0, {str(installed)!r})\n"
    return subprocess.run(
        [sys.executable, "-c", first + program, *words],
        cwd=cwd, capture_output=True, text=True, check=False,
    )  # fmt: skip


MAIN = "from hpcrun.cli.main import main; main()"


def hpcrun(installed: Path, *words: str, cwd: Path) -> str:
    """Run the installed hpcrun and return its output."""
    done = python(installed, MAIN, *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def citations(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.suffix in (".py", ".yaml", ".html", ".js") and path.is_file():
            text = path.read_text(encoding="utf-8")
            yield from (found[0] for found in CITED.finditer(text) if "://" not in found[0])


def test_a_wheel_has_every_file_that_the_package_cites(installed: Path) -> None:
    package = installed / "hpcrun"
    cited = set(citations(package)) - OF_DEVELOPERS
    assert {"sbatch/train.sbatch", "configs/gpt.yaml", "docs/sites.md"} <= cited
    # Pages of other projects, such as NVIDIA's, are no files of this one.
    ours = {name for name in cited if (ROOT / name).exists() or "docs/" not in name}
    assert not sorted(name for name in ours if not (package / name).is_file())


def test_a_wheel_has_the_scripts_configs_and_pages(installed: Path) -> None:
    for pattern in ("sbatch/*", "configs/*", "examples/*.py", "docs/**/*.md"):
        for path in ROOT.glob(pattern):
            copy = installed / "hpcrun" / path.relative_to(ROOT)
            assert copy.read_bytes() == path.read_bytes(), path


def test_an_installed_hpcrun_uses_its_own_files(installed: Path, tmp_path: Path) -> None:
    package = installed / "hpcrun"
    assert (installed / "bin" / "hpcrun").is_file()
    assert hpcrun(installed, "--help", cwd=tmp_path).splitlines()[-1].endswith(f" {package}")
    shown = hpcrun(
        *(installed, "submit", "--dry-run", "--executor", "local", "--cpu"),
        *("-c", "configs/gpt.yaml", "train.steps=700"),
        cwd=tmp_path,
    )
    assert "width: 768" in shown
    assert f"# run directory: {tmp_path}/runs/gpt" in shown


def test_a_config_of_the_user_comes_first(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "gpt.yaml").write_text("model: {width: 64}\n")
    shown = hpcrun(installed, "config", "show", "-c", "configs/gpt.yaml", cwd=tmp_path)
    assert "width: 64" in shown


def test_a_wheel_has_the_launcher_where_hydra_looks_for_it(installed: Path) -> None:
    assert (installed / "hydra_plugins" / "hpcrun_launcher.py").is_file()


HELP_OF_ALL = """
import hpcrun
from hpcrun.cli.main import COMMANDS, main

assert hpcrun.__file__.startswith(sys.path[0])
for command in COMMANDS:
    sys.argv[1:] = [command, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, command
"""


def test_every_command_of_an_installed_hpcrun_has_help(installed: Path, tmp_path: Path) -> None:
    done = python(installed, HELP_OF_ALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = set(re.findall(r"^usage: hpcrun (\S+)", done.stdout, re.M))
    assert shown >= set(COMMANDS)


LOAD_THE_TASKS = """
from pathlib import Path
from hpcrun.config import Config
from hpcrun.train.task import load_task

for name in ("autoencoder", "bdh", "classifier"):
    file = Path(sys.path[0], "hpcrun", "configs", name + ".yaml")
    task = load_task(Config.from_file(file))
    print(sys.modules[type(task).__module__].__file__)
"""


def test_an_installed_hpcrun_has_the_tasks_of_its_configs(installed: Path, tmp_path: Path) -> None:
    words = ("submit", "--dry-run", "--executor", "local", "--cpu", "-c", "configs/classifier.yaml")
    assert "task: examples.classifier:Classifier" in hpcrun(installed, *words, cwd=tmp_path)
    # A folder of the user with this name has other modules.
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "own.py").touch()
    assert "task: examples.classifier:Classifier" in hpcrun(installed, *words, cwd=tmp_path)
    done = python(installed, LOAD_THE_TASKS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(installed / "hpcrun" / "examples" / f"{name}.py")
        for name in ("autoencoder", "bdh", "classifier")
    ]


@pytest.mark.slow
def test_the_pages_work_with_an_installed_hpcrun(installed: Path) -> None:
    """Run the tests of the documented programs and commands with the wheel instead of the checkout."""
    pages = [f"tests/test_{name}.py" for name in ("first_task", "python_page", "guide")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *pages],
        cwd=ROOT,
        env=os.environ | {PACKAGE: str(installed), "HPCRUN_TEST_START": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
