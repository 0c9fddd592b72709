"""The program that prepares every node once, before the ranks: it stages data or unpacks an environment."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcrun.cluster.environment import export_lines

# Bash says what is wrong with a command, and not on which node it ran.
_NAMES_ITSELF = (
    "trap 'code=$?; [ $code -eq 0 ] || "
    'echo "hpcrun: node_setup failed on $SLURMD_NODENAME with exit code $code" >&2\' EXIT'
)


def node_setup_script(lines: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the shell program of a node: ``lines`` in order, up to the first that fails.

    Raises:
        ClusterError: a name in ``env`` is no variable of the shell.
    """
    # A warning of a preemption or of the time limit reaches these lines too, and would end them.
    ignore = "trap '' USR2"
    return "\n".join([*export_lines(env), _NAMES_ITSELF, ignore, "set -e", *lines])


def node_setup_command(
    nodes: int, lines: Sequence[str], env: Mapping[str, str], folder: Path
) -> list[str]:
    """Build the srun that runs ``lines`` once on each of the job's ``nodes``.

    It returns when all nodes are done, so that what follows is behind a barrier. If one node fails,
    srun ends the others and names that node, as it does with a rank.

    Args:
        env: variables for the lines, such as ``job.env``.
        folder: the attempt's logs. Each node writes to ``node-setup-NODE.log`` there.
    """
    logs = str(folder).replace("%", "%%")
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        # To unpack with all cores of the node, not with those of a single rank.
        "--cpu-bind=none",
        "--export=ALL",
        f"--output={logs}/node-setup-%N.log",
        "bash",
        "-c",
        node_setup_script(lines, env),
    ]
