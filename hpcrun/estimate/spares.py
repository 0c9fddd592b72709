"""The cost of spare nodes, and when they pay, from the formula of docs/spares.md. Imports no torch."""

import math
from dataclasses import dataclass

from hpcrun.errors import UserError

FAILURES = 419 / (2048 * 54 * 24)
"""Failures per node and hour of the Llama 3 training (arXiv:2407.21783, table 5): one in nine months."""
START_UP = 60.0
"""Seconds from the start of the ranks to the next step."""
JOB = 24.0
"""Hours of the job for which spares are counted."""
_ENOUGH = 0.95
# Seconds: SlurmdTimeout and the delay of a requeue, both by default; the replacement of a node.
_REQUEUE, _REPLACEMENT = 300.0 + 120.0, 10.0


@dataclass(frozen=True)
class SpareNodes:
    """Spare nodes of a job.

    ``failures``: of the job's nodes, on average. ``share``: of the node hours. ``requeue``, ``replacement``:
    seconds that a failure costs without the queue, and with a spare node. ``queue``: seconds in the queue
    from which spares save node hours; 0: always.
    """

    spares: int
    failures: float
    share: float
    requeue: float
    replacement: float
    queue: float


def spare_nodes(
    nodes: int, *, failures: float = FAILURES, start_up: float = START_UP, spares: int = 0
) -> SpareNodes:
    """Return the cost and the use of spare nodes for a job of 24 h.

    Args:
        nodes: of the ranks.
        failures: per node and hour.
        start_up: seconds from the start of the ranks to the next step.
        spares: their number; 0: as many as are enough in 95 of 100 jobs (Poisson distribution).

    Raises:
        UserError: ``failures`` or ``start_up`` is out of range.
    """
    for option, value, most in (("--failure-rate", failures, 1.0), ("--start-up", start_up, 1e6)):
        if not 0.0 < value <= most:
            raise UserError(f"{option}: {value:g} is not between 0 and {most:g}")
    mean = nodes * failures * JOB
    count = spares or _enough(mean)
    share = count / (nodes + count)
    saved = _REQUEUE - _REPLACEMENT
    queue = max(0.0, 3600.0 * share / (nodes * failures) - saved)
    return SpareNodes(count, mean, share, _REQUEUE + start_up, _REPLACEMENT + start_up, queue)


def _enough(mean: float) -> int:
    """Return the smallest number, at least 1, that a Poisson variable exceeds in at most 5 of 100 cases."""
    count, below = 0, math.exp(-mean)
    while count < 1 or below < _ENOUGH:
        count += 1
        below += math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
    return count
