"""An installation of this package that is replaced while jobs run."""

import shutil
from pathlib import Path

import hpcrun
from hpcrun.run.directory import RunDirectory

NEWER = "99.0"
# A module of the newer version that a process of the older version imports ends this process.
_CHECK = f"""
import sys
assert sys.modules["hpcrun"].__version__ == "{NEWER}", "an old process imports " + __name__
"""


def install(folder: Path) -> None:
    """Copy this package to ``folder``, which PYTHONPATH may name."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(hpcrun.__file__).parent, folder / "hpcrun", ignore=ignore)


def upgrade(folder: Path) -> None:
    """Replace the package in ``folder`` as pip does: all old files go, then the new files come."""
    package, old = folder / "hpcrun", folder / "~pcrun"
    package.rename(old)
    shutil.copytree(old, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(old)
    start = package / "__init__.py"
    text = start.read_text()
    start.write_text(text.replace(f'"{hpcrun.__version__}"', f'"{NEWER}"'))
    for path in package.rglob("*.py"):
        path.write_text(path.read_text() + _CHECK)


def mixed(run: RunDirectory) -> list[str]:
    """Return the lines of the logs of ``run`` that show an old process with new code."""
    logs = [path for path in run.logs.rglob("*.log") if path.is_file()]
    lines = [line for path in logs for line in path.read_text(errors="replace").splitlines()]
    return [line for line in lines if "AssertionError: an old process imports" in line]
