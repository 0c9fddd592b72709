"""Slurm installations next to the system's: their places, and the search path that finds them.

The places are fixed. A later `exec` or `down` of any shell finds the programs by the version that
the cluster's spec names.
"""

from __future__ import annotations

from pathlib import Path

from .commands import SYSTEM_PATH

CACHE = Path("/var/cache/hpcrun-devcluster")


def prefix(version: str) -> Path:
    """Return the directory for ``version``; if the directory exists, the installation is complete."""
    return CACHE / f"slurm-{version}"


def installed(version: str) -> bool:
    """Return True for a complete installation; "" is the system's version and always True."""
    return not version or prefix(version).is_dir()


def search_path(version: str) -> str:
    """Return a PATH that finds the programs of ``version`` first; "" is the system's version."""
    if not version:
        return SYSTEM_PATH
    return f"{prefix(version)}/sbin:{prefix(version)}/bin:{SYSTEM_PATH}"


def plugin_dir(version: str) -> Path:
    """Return the plugin directory of ``version``, for PluginDir in slurm.conf and slurmdbd.conf."""
    return prefix(version) / "plugins"


def stepd(version: str) -> Path:
    """Return the step daemon of ``version``; by default slurmd would start the one at its build's path."""
    return prefix(version) / "sbin" / "slurmstepd"
