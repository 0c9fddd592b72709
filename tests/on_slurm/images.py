"""A real Apptainer, and an image with this machine's Python and a name of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from .cluster import SlurmCluster

# The helper of the Slurm tests puts the tool's modules on the path.
from devclusterlib import apptainerinstall  # isort: skip

PREFIX = apptainerinstall.PREFIX
NAME = "image of the tests"
# The packages of the tests and this checkout, under names that the host does not have.
MOUNTS = [f"{Path(torch.__file__).parents[1]}:/packages:ro", f"{Path(__file__).parents[2]}:/hpcrun"]
_SETUP = "export PATH={path}/bin:$PATH APPTAINER_TMPDIR={temporary}"
_PROGRAMS = ("bash", "cat", "env", "hostname", "sh", "sleep", "true")
_LIBRARIES = ("libgcc_s.so.1", "libstdc++.so.6", "librt.so.1", "libdl.so.2", "libpthread.so.0")
_FOLDERS = (
    "etc",
    "proc",
    "sys",
    "dev",
    "tmp",
    "root",
    "home",
    "run",
    "var/tmp",
    "usr/bin",
    "usr/lib64",
)


def setup(image: Path) -> str:
    """Return the line that finds Apptainer; its temporary files go to the folder of the image."""
    # A rank that is killed leaves its files.
    return _SETUP.format(path=PREFIX, temporary=image.parent)


def make_root(root: Path) -> None:
    """Make the files of the image: Python, its standard library, a shell, and their shared libraries."""
    python, library = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
    for folder in (*_FOLDERS, python.parent.relative_to("/"), library.relative_to("/")):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    unused = (
        "test",
        "idlelib",
        "tkinter",
        "lib2to3",
        "site-packages",
        "dist-packages",
    )
    shutil.copytree(
        library, root / library.relative_to("/"), symlinks=False, dirs_exist_ok=True,
        ignore_dangling_symlinks=True, ignore=shutil.ignore_patterns(*unused),
    )  # fmt: skip
    programs = [Path(shutil.which(name) or name) for name in _PROGRAMS]
    for program in programs:
        shutil.copy(program, root / "usr/bin" / program.name)
    shutil.copy(python, root / python.relative_to("/"))
    if not (root / "usr/bin/python3").exists():
        (root / "usr/bin/python3").symlink_to(python)
    used = [python, *programs, *library.glob("lib-dynload/*.so")]
    found = _libraries_of(used)
    libc = next(path for path in found if Path(path).name == "libc.so.6")
    found |= {str(Path(libc).parent / name) for name in _LIBRARIES}
    for path in found:
        target = root / Path(path).relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if Path(path).exists() and not target.exists():
            shutil.copy(path, target)
    (root / "etc/os-release").write_text(f'PRETTY_NAME="{NAME}"\n')
    for name in ("passwd", "group"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)


def _libraries_of(programs: list[Path]) -> set[str]:
    done = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False)
    # A program's own line ends with a colon.
    return set(re.findall(r"(/\S+\.so[^\s:]*) \(", done.stdout))


def build(slurm: SlurmCluster) -> Path:
    """Build the image as a .sif file on the shared file system, as the job user; return the file."""
    folder = slurm.shared / "image"
    make_root(folder / "root")
    image, user = folder / "train.sif", slurm.shared.stat()
    os.chown(folder, user.st_uid, user.st_gid)
    # Compression would take the most time.
    fast = "-noD -noF -noI"
    command = ["apptainer", "build", "--mksquashfs-args", fast, str(image), str(folder / "root")]
    slurm.run(command, env={"PATH": f"{PREFIX}/bin:/usr/bin:/bin"}, cwd=folder)
    return image
