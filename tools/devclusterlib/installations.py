"""Slurm installations next to the system's: their places, and the search path that finds them.

The places are fixed. A later `exec` or `down` of any shell finds the programs by the version that
the cluster's spec names.
"""

from __future__ import annotations

from pathlib import Path

from .commands import SYSTEM_PATH

CACHE = Path("/var/cache/hpcrun-devcluster")


def prefix(version: str) -> Path:
    """Directory of the installation of ``version``; a directory there is a complete one."""
    return CACHE / f"slurm-{version}"


def installed(version: str) -> bool:
    """Return True for an installation that is complete; the system's own is "" and always True."""
    return not version or prefix(version).is_dir()


def search_path(version: str) -> str:
    """PATH that finds the programs of ``version`` before the system's; "" is the system's own."""
    if not version:
        return SYSTEM_PATH
    return f"{prefix(version)}/sbin:{prefix(version)}/bin:{SYSTEM_PATH}"


def plugin_dir(version: str) -> Path:
    """Directory of the plugins of ``version``, for PluginDir in slurm.conf and slurmdbd.conf."""
    return prefix(version) / "plugins"


def stepd(version: str) -> Path:
    """The step daemon of ``version``; slurmd would start the one of its build's own place."""
    return prefix(version) / "sbin" / "slurmstepd"
