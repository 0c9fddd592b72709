"""Which nodes a job should stay away from, by the ledger and by what Slurm says there is."""

import os
import time
from collections.abc import Mapping

from hpcrun.cluster import slurm
from hpcrun.cluster.hostlist import expand
from hpcrun.cluster.ledger import blame, blames, ledger_path, spare, suspects

_DEAD = ("DOWN", "FAIL", "ERROR", "NOT_RESPONDING", "UNKNOWN")


def nodes_to_avoid(
    partition: str | None,
    needed: int,
    *,
    after: int | None,
    hours: float,
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """The nodes that failed at least ``after`` times in the last ``hours``, worst first.

    ``needed`` nodes of the partition always remain; where Slurm does not answer, none is avoided.
    """
    if after is None:
        return []
    bad = suspects(blames(ledger_path(environ), time.time() - hours * 3600), after)
    if not bad:
        return []
    listed = slurm.run(slurm.sinfo_command(partition=partition))
    if listed.returncode != 0:
        return []
    return spare(bad, list(slurm.parse_sinfo(listed.stdout)), needed)


def blame_dead_nodes(hosts: str, run: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Remember those of ``hosts`` (a host list) that Slurm calls down; return them.

    Raises:
        OSError: the ledger cannot be written.
    """
    listed = slurm.run(slurm.sinfo_command(hosts=expand(hosts)))
    states = slurm.parse_sinfo(listed.stdout) if listed.returncode == 0 else {}
    dead = [node for node, state in states.items() if state.upper().startswith(_DEAD)]
    for node in dead:
        blame(ledger_path(environ), node, f"node failure ({states[node]})", run)
    return dead
