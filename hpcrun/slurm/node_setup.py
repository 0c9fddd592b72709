"""The program that prepares every node once before the ranks, for example stages data."""

import ctypes
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.errors import ClusterError
from hpcrun.slurm.commands import given_option
from hpcrun.slurm.notation import expand

# Bash prints the error of a command, but not the node.
_NAMES_ITSELF = (
    "trap 'code=$?; [ $code -eq 0 ] || "
    'echo "hpcrun: node_setup failed on $SLURMD_NODENAME with exit code $code" >&2\' EXIT'
)
# The options of srun that choose nodes by name or place.
_PLACING = {"nodelist": "w", "exclude": "x", "relative": "r"}


def node_setup_script(lines: Sequence[str]) -> str:
    """Return the shell program of a node: ``lines`` in order, up to the first that fails."""
    # A warning of a preemption or of the time limit would end these commands too.
    ignore = "trap '' USR1 USR2"
    return "\n".join([_NAMES_ITSELF, ignore, "set -e", *lines])


@dataclass(frozen=True)
class Component:
    """Nodes that one part of an srun command covers; ``options`` selects them."""

    nodes: int
    options: tuple[str, ...] = ()


def components(environ: Mapping[str, str], srun_args: Sequence[str]) -> list[Component]:
    """Return the nodes on which the ranks will run, by the components of a heterogeneous job.

    Args:
        environ: the environment of the batch script.
        srun_args: ``job.srun_args``. ``--het-group`` counts in a heterogeneous job; ``--nodes``,
            ``--nodelist``, ``--exclude`` and ``--relative`` count in any other job.

    Raises:
        ClusterError: the value of an option cannot be read, or names a component that the job lacks.
    """
    size = environ.get("SLURM_HET_SIZE")
    if size is None:
        return [_plain(environ, srun_args)]
    wanted = given_option(srun_args, "het-group")
    groups = _numbers(wanted) if wanted else list(range(int(size)))
    if not set(groups) <= set(range(int(size))):
        raise ClusterError(
            f"job.srun_args: --het-group={wanted}: the job has the components 0 to {int(size) - 1}"
        )
    return [
        Component(
            len(expand(environ[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"])), (f"--het-group={group}",)
        )
        for group in groups
    ]


def node_setup_command(parts: Sequence[Component], lines: Sequence[str], folder: Path) -> list[str]:
    """Build the srun that runs ``lines`` once on each node of ``parts``.

    srun returns when all nodes are done, so the ranks start after a barrier. If one node fails,
    srun ends the other nodes and names the node, as srun does for a rank.

    Args:
        folder: the attempt's logs. Each node writes to ``node-setup-NODE.log`` there.
    """
    logs = str(folder).replace("%", "%%")
    words = ["srun"]
    for number, part in enumerate(parts):
        words += [
            # srun starts all components as one step.
            *([":"] if number else []),
            f"--nodes={part.nodes}",
            f"--ntasks={part.nodes}",
            "--ntasks-per-node=1",
            *part.options,
            "--kill-on-bad-exit=1",
            # All cores of the node may unpack, not only those of a single rank.
            "--cpu-bind=none",
            "--export=ALL",
            f"--output={logs}/node-setup-%N.log",
            "bash",
            "-c",
            node_setup_script(lines),
        ]
    return words


def _plain(environ: Mapping[str, str], srun_args: Sequence[str]) -> Component:
    """Return the nodes of a job with one component."""
    found = {
        long: value
        for long, short in _PLACING.items()
        if (value := given_option(srun_args, long, short)) is not None
    }
    options = tuple(f"--{long}={value}" for long, value in found.items())
    count = re.match(r"\d+", given_option(srun_args, "nodes", "N") or "")
    if count is not None:
        return Component(int(count[0]), options)
    if "nodelist" in found:
        return Component(len(expand(found["nodelist"])), options)
    nodes = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    if "exclude" in found:
        nodes -= len({*expand(found["exclude"])} & {*expand(environ["SLURM_JOB_NODELIST"])})
    first = found.get("relative", "0")
    return Component(nodes - (int(first) if first.isdecimal() else 0), options)


def _numbers(groups: str) -> list[int]:
    """Read the value of ``--het-group``, such as ``0,2-3``.

    Raises:
        ClusterError: srun would not read ``groups`` either.
    """
    found: list[int] = []
    for part in groups.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if bounds is None:
            raise ClusterError(f"job.srun_args: --het-group={groups}: write numbers such as 0,2-3")
        found += range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
    return found


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant that loses its parent."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends; for a child process, before its exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
