"""The start of a preflight's agents: one task a node by srun, or processes of this machine."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcrun.network.check import fleet
from hpcrun.preflight.coordinator import Coordinator
from hpcrun.preflight.measured import Asked, Measured

_AGENT = ("-m", "hpcrun.preflight.agent")
# srun would obey these requests of the ranks, and give the one task a node a rank's share only.
_OF_RANKS = (
    "SLURM_CPUS_PER_TASK",
    "SLURM_GPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
)


def check_nodes(
    nodes: Sequence[str],
    asked: Asked,
    *,
    folder: Path | None,
    interface: str | None = None,
    python: str | None = None,
    container: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> Measured:
    """Check ``nodes`` of this allocation, in the environment of the ranks.

    A node on which srun can start no task keeps the others from starting, so that they start once more.

    Args:
        folder: a shared folder, in which the nodes write and read files; None: no such check.
        interface: ``job.interface``.
        python: ``job.python``.
        container: ``job.container``.
    """
    own = {name: value for name, value in environ.items() if name not in _OF_RANKS}
    agent = [*container, python or sys.executable, *_AGENT]
    lost: dict[str, str] = {}
    while True:
        here = [node for node in nodes if node not in lost]
        command = fleet.srun_command(here, agent)
        command[1:1] = ["--mem=0", "--cpu-bind=none", "--export=ALL"]
        started = fleet.Processes([(command, own)])
        measured = _talk(started, here, asked, folder, interface)
        dead = fleet.not_launched(started.words(), here)
        if lost or not dead or len(dead) == len(here) or len(measured.silent) < len(here):
            break
        lost = dict.fromkeys(dead, "srun cannot start a task there")
    if len(measured.silent) == len(here) and not lost:
        words = " ".join(started.words().split())[:300]
        measured.silent = dict.fromkeys(here, words or "no answer")
    measured.nodes, measured.silent = list(nodes), lost | measured.silent
    return measured


def check_here(
    count: int, asked: Asked, *, folder: Path | None, environ: Mapping[str, str] = os.environ
) -> Measured:
    """Check this machine by ``count`` processes in place of nodes."""
    names = [f"local{index}" for index in range(count)]
    command = [sys.executable, *_AGENT]
    started = fleet.Processes([(command, {**environ, "HPCRUN_CHECK_NAME": name}) for name in names])
    return _talk(started, names, asked, folder, None)


def _talk(
    started: fleet.Processes,
    nodes: list[str],
    asked: Asked,
    folder: Path | None,
    interface: str | None,
) -> Measured:
    try:
        return Coordinator(started, nodes, asked, folder=folder, interface=interface).run()
    finally:
        started.close()
