"""What the machine must have, said before anything is made; and the packages that bring it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from . import installations
from .commands import SYSTEM_PATH, clean_environment, running_as_root
from .errors import Refusal
from .spec import ClusterSpec


@dataclass(frozen=True)
class Feature:
    """A group of programs that are wanted together, and Debian's packages that hold them."""

    programs: tuple[str, ...]
    packages: tuple[str, ...]
    option: str = ""


BASE = Feature(
    programs=(
        *("slurmctld", "slurmd", "sbatch", "munged"),
        *("ip", "tc", "nft", "nsenter", "unshare", "setpriv"),
        *("mount", "umount", "hostname", "useradd", "userdel"),
    ),
    packages=(
        *("slurm-wlm", "munge", "iproute2", "nftables"),
        *("util-linux", "mount", "hostname", "passwd"),
    ),
)
ACCOUNTING = Feature(
    programs=("slurmdbd", "mariadbd", "mariadb-install-db"),
    # The -core packages bring the programs without a service that starts by itself.
    packages=("slurmdbd", "slurm-wlm-mysql-plugin", "mariadb-server-core", "mariadb-client-core"),
    option="--accounting",
)
GLUSTER = Feature(
    programs=("glusterfsd", "glusterfs"),
    packages=("glusterfs-common", "glusterfs-client"),
    option="--shared-fs gluster",
)
MOOSEFS = Feature(
    programs=("mfsmaster", "mfschunkserver", "mfsmount"),
    packages=("moosefs-master", "moosefs-chunkserver", "moosefs-client"),
    option="--shared-fs moosefs",
)


def features(*, accounting: bool, shared_fs: str) -> list[Feature]:
    """What a cluster of this kind needs."""
    wanted = [BASE]
    if accounting:
        wanted.append(ACCOUNTING)
    if shared_fs == "gluster":
        wanted.append(GLUSTER)
    if shared_fs == "moosefs":
        wanted.append(MOOSEFS)
    return wanted


def missing_programs(feature: Feature, path: str = SYSTEM_PATH) -> list[str]:
    """Programs of ``feature`` that the machine lacks on the search path ``path``."""
    return [name for name in feature.programs if shutil.which(name, path=path) is None]


def require_root() -> None:
    """Refuse anybody but root."""
    if not running_as_root():
        raise Refusal(
            "making hosts out of namespaces needs root", "run it with sudo, or as root in CI"
        )


def require(spec: ClusterSpec) -> None:
    """Refuse a machine that lacks what ``spec`` needs."""
    require_root()
    if not installations.installed(spec.slurm):
        raise Refusal(
            f"Slurm {spec.slurm} is not installed next to the system's",
            f"run `tools/devcluster install --slurm {spec.slurm}`",
        )
    path = installations.search_path(spec.slurm)
    for feature in features(accounting=spec.accounting, shared_fs=spec.shared_fs):
        lacking = missing_programs(feature, path)
        if lacking:
            install = " ".join(["tools/devcluster install", feature.option]).strip()
            raise Refusal(
                f"not installed: {', '.join(lacking)} (packages {', '.join(feature.packages)})",
                f"run `{install}`",
            )
    if spec.shared_fs != "local" and not Path("/dev/fuse").exists():
        raise Refusal(
            f"--shared-fs {spec.shared_fs} needs /dev/fuse",
            "load the kernel module fuse, or pass the device into the container",
        )


def install_commands(packages: list[str]) -> list[list[str]]:
    """The `apt-get` calls that install ``packages``."""
    return [
        ["apt-get", "update", "--quiet"],
        ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *packages],
    ]


def install_environment() -> dict[str, str]:
    """No questions; and no service of the machine is started, ours run privately.

    RUNLEVEL=1 is what Debian's invoke-rc.d reads to decide that now is not the time.
    """
    proxies = {key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")}
    return clean_environment() | proxies | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
