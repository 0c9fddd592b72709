"""Install another version of Slurm: Debian's packages, unpacked next to the system's.

The packages come with their C library. The programs are patched to use that library, so they run on
an older Debian.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import aptroot, installations, wrappers
from .commands import run
from .errors import Refusal
from .registry import exclusive

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurmdbd"),
    *("slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin", "patchelf"),
)
DAEMONS = ("slurmctld", "slurmd", "slurmstepd", "slurmdbd")
COMMANDS = (*wrappers.COMMANDS, "sbcast", "sreport", "strigger")
TEMPORARY = ".making-"


def install(version: str, env: dict[str, str]) -> str:
    """Install Slurm ``version`` below `installations.CACHE` and return one line about it.

    The directory appears under its final name when it is complete. A second call finds it and does
    nothing; a concurrent second call waits for the first.

    Raises `Unavailable` if the packages cannot be downloaded, `Refusal` if they cannot be used.
    """
    os.umask(0o022)
    target = installations.prefix(version)
    with exclusive(installations.CACHE):
        if installations.installed(version):
            return f"Slurm {version} is installed in {target} already"
        for leftover in installations.CACHE.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover)
        work = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=installations.CACHE))
        try:
            # apt downloads as another user, who needs access.
            work.chmod(0o755)
            banner = build(work, version, env)
            (work / "prefix").rename(target)
        finally:
            shutil.rmtree(work)
    return f"installed: {banner} in {target}"


def build(work: Path, version: str, env: dict[str, str]) -> str:
    """Make the whole prefix as ``work/prefix``; return the version that slurmctld prints."""
    apt = aptroot.find_suite(work, aptroot.system_mirror(), "slurmctld", version, env)
    root = work / "prefix" / "root"
    root.mkdir(parents=True)
    for package in apt.download(PACKAGES):
        run(["dpkg-deb", "--extract", str(package), str(root)])
    drop_privileges(root)
    final = installations.prefix(version) / "root"
    libraries = one(root, "usr/lib/*/slurm-wlm/libslurm*.so").parents[1]
    link_programs(work / "prefix", root)
    (work / "prefix" / "plugins").symlink_to((libraries / "slurm-wlm").relative_to(work / "prefix"))
    patch(root, final, libraries)
    banner = run([*through_loader(libraries), str(program(root, "slurmctld")), "-V"]).strip()
    if f" {version}." not in f"{banner} ":
        raise Refusal(f"the packages of {version} hold {banner}", "take another version")
    return banner


def drop_privileges(root: Path) -> None:
    """Remove set-user-id and set-group-id bits: no program here may become root."""
    for folder, _, files in os.walk(root):
        for name in files:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
                path.chmod(stat.S_IMODE(mode) & 0o777)


def one(root: Path, pattern: str) -> Path:
    """Return the first path below ``root`` that matches; raises `Refusal` if none does."""
    found = sorted(root.glob(pattern))
    if not found:
        raise Refusal(f"the packages hold no {pattern}", "Debian has changed; report it")
    return found[0]


def program(root: Path, name: str) -> Path:
    """Return the file of a Slurm program; Debian names most of them NAME-wlm."""
    folder = "sbin" if name in DAEMONS else "bin"
    return one(
        root, f"usr/{folder}/{name}-wlm" if has_suffix(root, name) else f"usr/{folder}/{name}"
    )


def has_suffix(root: Path, name: str) -> bool:
    """Return True if the packages name the program NAME-wlm."""
    return any(root.glob(f"usr/*bin/{name}-wlm"))


def link_programs(prefix: Path, root: Path) -> None:
    """Make ``sbin`` and ``bin`` with links under Slurm's own names."""
    for folder, names in (("sbin", DAEMONS), ("bin", COMMANDS)):
        (prefix / folder).mkdir()
        for name in dict.fromkeys(names):
            target = program(root, name).relative_to(prefix)
            (prefix / folder / name).symlink_to(Path("..") / target)


def loader_of(libraries: Path) -> Path:
    """Return the dynamic loader among the C library's files."""
    return one(libraries, "ld-linux*.so.*")


def through_loader(libraries: Path) -> list[str]:
    """Return a command line that starts a program before its files are at their final place."""
    path = f"{libraries}:{libraries}/slurm-wlm"
    return [str(loader_of(libraries)), "--library-path", path]


def patch(root: Path, final: Path, libraries: Path) -> None:
    """Make the programs and plugins use the libraries in ``final``, the later place of ``root``."""
    place = final / libraries.relative_to(root)
    rpath = ["--force-rpath", "--set-rpath", f"{place}:{place}/slurm-wlm"]
    interpreter = ["--set-interpreter", str(place / loader_of(libraries).name)]
    patchelf = [*through_loader(libraries), str(root / "usr/bin/patchelf")]
    programs = [program(root, name) for name in dict.fromkeys((*DAEMONS, *COMMANDS))]
    plugins = [path for path in sorted(libraries.glob("slurm-wlm/*.so")) if not path.is_symlink()]
    run([*patchelf, *interpreter, *rpath, *strings(programs)])
    run([*patchelf, *rpath, *strings(plugins)])


def strings(paths: Sequence[Path]) -> list[str]:
    """Return paths as words of a command line; each file once, with links resolved."""
    return sorted({str(path.resolve()) for path in paths})
