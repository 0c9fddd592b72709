"""A wheel of this checkout, installed into a folder."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("hpcrun", "hydra_plugins", "sbatch", "configs", "examples", "docs", "tools")
_FILES = ("LICENSE", "MANIFEST.in", "pyproject.toml", "README.md", "setup.py")


def _pip(*words: str | Path, cwd: Path) -> None:
    """Run pip without a network."""
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words[:1], *options, *words[1:]],
        cwd=cwd, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def installed_wheel(folder: Path) -> Path:
    """Build a wheel and install it; return the folder with the package, which PYTHONPATH may name."""
    source = folder / "source"
    for name in _FOLDERS:
        ignore = shutil.ignore_patterns("__pycache__", "pictures")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in _FILES:
        shutil.copy(ROOT / name, source)
    _pip("wheel", "--no-build-isolation", "-w", folder, ".", cwd=source)
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    _pip("install", "--target", folder / "installed", wheel, cwd=folder)
    return folder / "installed"
