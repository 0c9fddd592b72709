"""Requirements of the machine, checked before anything is made, and the packages that meet them."""

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
    """A group of programs that are needed together, and the Debian packages with these programs."""

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
    # The -core packages have the programs without a service that starts automatically.
    packages=("slurmdbd", "slurm-wlm-mysql-plugin", "mariadb-server-core", "mariadb-client-core"),
    option="--accounting",
)
GLUSTER = Feature(
    programs=("glusterfsd", "glusterfs"),
    packages=("glusterfs-common", "glusterfs-client"),
    option="--shared-fs gluster",
)


def features(*, accounting: bool, shared_fs: str) -> list[Feature]:
    """Return the features that a cluster of this kind needs."""
    wanted = [BASE]
    if accounting:
        wanted.append(ACCOUNTING)
    if shared_fs == "gluster":
        wanted.append(GLUSTER)
    return wanted


def missing_programs(feature: Feature, path: str = SYSTEM_PATH) -> list[str]:
    """Return the programs of ``feature`` that are not on the search path ``path``."""
    return [name for name in feature.programs if shutil.which(name, path=path) is None]


def require_root() -> None:
    """Refuse every user except root."""
    if not running_as_root():
        raise Refusal(
            "making hosts out of namespaces needs root", "run it with sudo, or as root in CI"
        )


def require(spec: ClusterSpec) -> None:
    """Refuse a machine that does not meet the requirements of ``spec``."""
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
    """Return the `apt-get` calls that install ``packages``."""
    return [
        ["apt-get", "update", "--quiet"],
        ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *packages],
    ]


def install_environment() -> dict[str, str]:
    """Return an environment without questions, and without a start of services: the cluster runs its own.

    Debian's invoke-rc.d reads RUNLEVEL=1 and starts no service.
    """
    proxies = {key: value for key, value in os.environ.items() if key.lower().endswith("_proxy")}
    return clean_environment() | proxies | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
