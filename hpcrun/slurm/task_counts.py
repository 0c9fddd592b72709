"""Parse the number of tasks of each node: the compressed counts of SLURM_TASKS_PER_NODE.

It is a separate module because many launchers misread ``4(x2),2``, and a job with an
uneven last node then loses its ranks.
"""

import re

from hpcrun.errors import ClusterError

_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?")


def tasks_per_node(text: str) -> list[int]:
    """Return the tasks of each node, in the node list's order: ``"4(x2),2"`` gives [4, 4, 2].

    The notation is sbatch(1)'s for SLURM_TASKS_PER_NODE: a count, repeated ``(xN)`` times for
    consecutive nodes.

    Raises:
        ClusterError: the text is empty or not in that notation.
    """
    tasks: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None or match.group(2) == "0":
            raise ClusterError(
                f"tasks per node {text!r}: {part!r} is not a count; "
                "expected Slurm's notation such as 4(x2),2 (from SLURM_TASKS_PER_NODE)"
            )
        tasks += [int(match.group(1))] * int(match.group(2) or 1)
    return tasks
