"""The record of a run, for later readers: command line, commit, uncommitted changes, versions."""

import getpass
import os
import platform
import shlex
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrun.run.code.work_tree import PRIVATE

_PACKAGES = ("hpcrun", "torch", "submitit", "numpy", "h5py", "pydantic")


def describe(argv: Sequence[str], executor: str, folder: Path) -> dict[str, Any]:
    """Return the identity of a run submitted from ``folder`` with the command line ``argv``."""
    return {
        "created": round(time.time(), 3),
        "command": shlex.join(argv),
        "executor": executor,
        "folder": str(folder),
        "user": user_name(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "git": git_commit(folder),
    }


def user_name() -> str:
    """Return the user's name, or the user id if it has no name (containers)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def git_commit(folder: Path) -> dict[str, Any] | None:
    """Return the commit checked out at ``folder``, and if it has uncommitted changes; None without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit.strip(), "dirty": bool(uncommitted_diff(folder))}


def uncommitted_diff(folder: Path) -> str:
    """Return the uncommitted changes of tracked files as a patch; empty without changes.

    Files with passwords and keys are left out.
    """
    private = [f":(top,exclude,glob,icase)**/{name}" for name in PRIVATE]
    return _git(folder, "diff", "HEAD", "--", ":/", *private) or ""


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
