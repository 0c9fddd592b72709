"""An installed package contains more than its modules."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_wheel_holds_the_batch_scripts(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("hpcrun", "hydra_plugins", "sbatch"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("LICENSE", "MANIFEST.in", "pyproject.toml", "README.md", "setup.py"):
        shutil.copy(ROOT / name, source)
    command = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        tmp_path,
        ".",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *command], cwd=source, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    found = subprocess.run(
        [sys.executable, "-c", "import hpcrun.slurm.launch.raw_script as r; print(r.SCRIPTS)"],
        cwd=tmp_path / "installed", capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    assert Path(found) == tmp_path / "installed" / "hpcrun" / "sbatch"
    scripts = {path.name: path.read_text() for path in Path(found).iterdir()}
    assert scripts == {path.name: path.read_text() for path in (ROOT / "sbatch").iterdir()}
    # hydra looks for launchers in this folder of the search path.
    assert (tmp_path / "installed" / "hydra_plugins" / "hpcrun_launcher.py").is_file()
