"""List the nodes that failed your runs: how often, when, why, and if excluded.

A node that failed job.exclude_after times within job.exclude_hours is excluded
by submissions and requeues of all your runs while enough other nodes are up.
--forgive clears the failures of a node after its repair. Clusters that share
your home share the list; a failure counts only on its own cluster. --json
prints one object per line.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hpcrun.cli.output import aligned, print_json
from hpcrun.config import Job
from hpcrun.errors import UserError
from hpcrun.printing import escaped, say
from hpcrun.slurm.avoided_nodes import (
    NodeFailure,
    bad_nodes_path,
    forgive,
    node_failures,
    own_cluster,
)


@dataclass(frozen=True)
class NodeRecord:
    """A node's failures, oldest first; ``recent``: the number that count; ``excluded``: now."""

    cluster: str
    node: str
    failures: Sequence[NodeFailure]
    recent: int
    excluded: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--forgive", metavar="NODE", help="clear the failures of NODE")
    parser.add_argument(
        "--cluster", metavar="NAME", help="show or clear only nodes of this cluster"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per node")


def run(arguments: argparse.Namespace) -> int:
    """Show the bad-node list, or clear one of its nodes."""
    path = bad_nodes_path()
    known = node_failures(path, 0.0)
    if arguments.cluster is not None:
        known = [entry for entry in known if entry.cluster == arguments.cluster]
    if arguments.forgive is not None:
        node = arguments.forgive
        cluster = _cluster_of(node, known)
        forgive(path, node, cluster)
        of = f" of {cluster}" if cluster else ""
        say(f"hpcrun: {node}{of}: forgiven; new jobs may use it again")
        return 0
    rule = Job()
    records = _records(known, rule.exclude_after, rule.exclude_hours)
    if arguments.json:
        for record in records:
            print_json(asdict(record))
        return 0
    if not records:
        say("hpcrun: no node has failed one of your runs")
        return 0
    say(*aligned(_rows(records)))
    if any(record.excluded for record in records):
        say(
            f"excluded: {rule.exclude_after} failures or more in {rule.exclude_hours:g} h "
            "(job.exclude_after, job.exclude_hours of a run may differ); "
            "`hpcrun nodes --forgive NODE` ends the exclusion"
        )
    return 0


def _cluster_of(node: str, known: Sequence[NodeFailure]) -> str:
    """Return the cluster on which ``node`` has failures; that of this host if there are several.

    Raises:
        UserError: no failure of the node is known, or only failures on several other clusters.
    """
    clusters = {entry.cluster for entry in known if entry.node == node}
    if not clusters:
        names = ", ".join(sorted({entry.node for entry in known}))
        listed = f"known are {names}" if names else "no node is recorded"
        raise UserError(
            f"--forgive {node}: no failure is recorded for this node; {listed} (see `hpcrun nodes`)"
        )
    if len(clusters) == 1:
        return clusters.pop()
    here = own_cluster()
    if here not in clusters:
        names = ", ".join(sorted(filter(None, clusters)))
        raise UserError(
            f"--forgive {node}: several clusters have a node of this name; add --cluster: {names}"
        )
    return here


def _records(known: Sequence[NodeFailure], after: int | None, hours: float) -> list[NodeRecord]:
    """Return a record for each node with failures, the newest failure first."""
    recent = [entry for entry in known if entry.time >= time.time() - hours * 3600]
    by_node: dict[tuple[str, str], list[NodeFailure]] = {}
    for entry in known:
        by_node.setdefault((entry.cluster, entry.node), []).append(entry)
    # A failure without a cluster counts only where the cluster has no name.
    named = "" if all(cluster for cluster, _ in by_node) else own_cluster()
    records = []
    for (cluster, node), failures in by_node.items():
        counted = [entry for entry in failures if entry in recent]
        out = after is not None and len(counted) >= after and not (named and not cluster)
        records.append(NodeRecord(cluster, node, failures, len(counted), out))
    return sorted(records, key=lambda record: -record.failures[-1].time)


def _rows(records: Sequence[NodeRecord]) -> list[list[str]]:
    """Return the cells of the table: the nodes with their failures, the newest failure first."""
    clusters = any(record.cluster for record in records)
    rows = [[*(["cluster"] if clusters else []), "node", "excluded", "failures"]]
    for record in records:
        lead = [escaped(record.cluster) or "-"] if clusters else []
        lead += [escaped(record.node), "yes" if record.excluded else "no"]
        for failure in reversed(record.failures):
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(failure.time))
            rows.append([*lead, escaped(f"{when}  {failure.why} ({failure.run})")])
            lead = [""] * len(lead)
    return rows
