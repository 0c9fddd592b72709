"""Slurm's commands for a shell outside the cluster.

The controller is reachable from inside its network only. These scripts enter the network as the job
user, in the caller's directory, so that `sbatch` works after `eval "$(devcluster env)"`.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from .layout import Layout

COMMANDS = (
    "sacct",
    "sacctmgr",
    "salloc",
    "sattach",
    "sbatch",
    "scancel",
    "scontrol",
    "sdiag",
    "sinfo",
    "sprio",
    "squeue",
    "srun",
    "sshare",
    "sstat",
)


def tool() -> Path:
    """Return the path of the `devcluster` program of this package."""
    return Path(__file__).resolve().parent.parent / "devcluster"


def script(name: str, command: str) -> str:
    """Return a shell script that runs ``command`` on the login host of cluster ``name``."""
    step_in = [str(tool()), "exec", "--name", name]
    quoted = " ".join(shlex.quote(word) for word in step_in)
    return f'#!/bin/sh\nexec {quoted} --cwd "$PWD" login -- {command} "$@"\n'


def write(layout: Layout, name: str) -> None:
    """Write one wrapper per command."""
    for command in COMMANDS:
        path = layout.bin / command
        path.write_text(script(name, command))
        path.chmod(0o755)


def exports(layout: Layout, name: str) -> str:
    """Return lines for `eval` in a root shell on the machine."""
    return (
        f"export DEVCLUSTER_NAME={shlex.quote(name)}\n"
        f"export SLURM_CONF={shlex.quote(str(layout.slurm_conf))}\n"
        f"export PATH={shlex.quote(str(layout.bin))}:$PATH\n"
    )
