"""A wheel of this checkout, built from its sdist as a release is, and installed into a folder."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("hpcrun", "hydra_plugins", "sbatch", "configs", "examples", "docs", "tools")
_FILES = ("LICENSE", "MANIFEST.in", "pyproject.toml", "README.md", "setup.py")


_BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def _python(*words: str | Path, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def _pip(command: str, *words: str | Path, cwd: Path) -> None:
    """Run pip without a network."""
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    _python("-m", "pip", command, *options, *words, cwd=cwd)


def installed_wheel(folder: Path) -> Path:
    """Build the sdist, a wheel of it, and install that; return the folder for PYTHONPATH."""
    source = folder / "source"
    for name in _FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__", "pictures")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in _FILES:
        shutil.copy(ROOT / name, source)
    _python("-c", _BUILD_SDIST, folder, cwd=source)
    shutil.rmtree(source)
    (sdist,) = folder.glob("*.tar.gz")
    _pip("wheel", "--no-build-isolation", "-w", folder, sdist, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    _pip("install", "--target", folder / "installed", wheel, cwd=folder)
    return folder / "installed"
