"""The program that prepares every node once before the ranks, for example stages data."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcrun.slurm.commands import given_option
from hpcrun.slurm.notation import STEPS, expand

# Bash prints the error of a command, but not the node.
_NAMES_ITSELF = (
    "trap 'code=$?; [ $code -eq 0 ] || "
    'echo "hpcrun: node_setup failed on $SLURMD_NODENAME with exit code $code" >&2\' EXIT'
)
# With these a step shares a node with a lost step, survives the loss of a node, and does not wait forever.
_SHARING = ("overlap", "no-kill", "immediate")


def node_setup_script(lines: Sequence[str]) -> str:
    """Return the shell program of a node: ``lines`` in order, up to the first that fails."""
    # A warning of a preemption or of the time limit would end these commands too.
    ignore = "trap '' USR1 USR2"
    return "\n".join([_NAMES_ITSELF, ignore, "set -e", *lines])


def node_setup_command(
    environ: Mapping[str, str], srun_args: Sequence[str], lines: Sequence[str], folder: Path
) -> list[str]:
    """Build the srun that runs ``lines`` once on each node of the ranks.

    srun returns when all nodes are done, so the ranks start after a barrier. If one node fails,
    srun ends the other nodes and names the node, as srun does for a rank.

    Args:
        environ: the environment of the batch script.
        srun_args: of the ranks; ``--nodes``, ``--nodelist``, ``--overlap``, ``--no-kill`` and
            ``--immediate`` count.
        folder: the attempt's logs. Each node writes to ``node-setup-NODE.log`` there.
    """
    given = given_option(srun_args, "nodelist", "w")
    count = re.match(r"\d+", given_option(srun_args, "nodes", "N") or "")
    nodes = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    if count is not None:
        nodes = int(count[0])
    elif given is not None:
        nodes = len(expand(given))
    sharing = {name: given_option(srun_args, name) for name in _SHARING}
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        *([] if given is None else [f"--nodelist={given}"]),
        "--kill-on-bad-exit=1",
        *(f"--{name}={value}".rstrip("=") for name, value in sharing.items() if value is not None),
        f"--job-name={STEPS}node-setup",
        # All cores of the node may unpack, not only those of a single rank.
        "--cpu-bind=none",
        "--export=ALL",
        f"--output={str(folder).replace('%', '%%')}/node-setup-%N.log",
        "bash",
        "-c",
        node_setup_script(lines),
    ]
