"""Install Apptainer: Debian's package, unpacked next to the system's programs.

Debian 12 has no Apptainer. The package comes from a later suite with its C library. Apptainer finds its
configuration and its programs by its own path, and runs without set-user-id bits in a user namespace.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from . import aptroot, installations
from .commands import run
from .errors import Unavailable
from .registry import exclusive
from .slurminstall import TEMPORARY, drop_privileges, loader_of, one

PREFIX = installations.CACHE / "apptainer"
"""If the directory exists, the installation is complete; its ``bin`` belongs on PATH."""
# The first of Debian's suites that has the package.
SUITE = "unstable"
PROGRAMS = ("apptainer", "mksquashfs", "unsquashfs")


def install(env: dict[str, str]) -> str:
    """Install Apptainer below `installations.CACHE` and return one line about it.

    As `slurminstall.install`: the directory appears when it is complete, and a second call does nothing.

    Raises `Unavailable` if the packages cannot be downloaded, `Refusal` if they cannot be used.
    """
    os.umask(0o022)
    with exclusive(installations.CACHE):
        if PREFIX.is_dir():
            return f"Apptainer is installed in {PREFIX} already"
        work = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=installations.CACHE))
        try:
            # apt downloads as another user, who needs access.
            work.chmod(0o755)
            build(work, env)
            (work / "prefix").rename(PREFIX)
        finally:
            shutil.rmtree(work)
    return f"installed: {run([str(PREFIX / 'bin/apptainer'), '--version']).strip()} in {PREFIX}"


def build(work: Path, env: dict[str, str]) -> None:
    """Make the whole prefix as ``work/prefix``."""
    apt = aptroot.AptRoot(work / SUITE, aptroot.system_mirror(), SUITE, env)
    failure = apt.update()
    if failure:
        raise Unavailable(f"Debian's suite {SUITE} cannot be fetched ({failure})", "try again")
    root = work / "prefix" / "root"
    root.mkdir(parents=True)
    for package in apt.download(("apptainer", "patchelf")):
        run(["dpkg-deb", "--extract", str(package), str(root)])
    drop_privileges(root)
    # Apptainer looks for these two next to the folders of its programs.
    (root / "var/lib/apptainer/mnt/session").mkdir(parents=True, exist_ok=True)
    for folder in ("usr", "usr/lib"):
        up = "/".join(".." for _ in Path(folder).parts)
        for name in ("etc", "var"):
            (root / folder / name).symlink_to(f"{up}/{name}")
    libraries = loader_of(one(root, "usr/lib/*/ld-linux*.so.*").parent).parent
    programs = [root / "usr/bin" / name for name in PROGRAMS]
    patch(root, libraries, [*programs, one(root, "usr/lib/*/apptainer/bin/starter")])
    (work / "prefix/bin").mkdir()
    for name in PROGRAMS:
        (work / "prefix/bin" / name).symlink_to(f"../root/usr/bin/{name}")


def patch(root: Path, libraries: Path, programs: list[Path]) -> None:
    """Make ``programs`` use the libraries at the later place of ``root``."""
    final = PREFIX / "root" / libraries.relative_to(root)
    loader = [str(loader_of(libraries)), "--library-path", str(libraries)]
    interpreter = ["--set-interpreter", str(final / loader_of(libraries).name)]
    paths = ["--force-rpath", "--set-rpath", str(final)]
    command = [*loader, str(root / "usr/bin/patchelf"), *interpreter, *paths]
    run([*command, *map(str, programs)])
