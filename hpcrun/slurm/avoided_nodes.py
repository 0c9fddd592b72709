"""Nodes to exclude from a job, according to the bad-node list and to Slurm.

A job that excludes all nodes on which it could run waits forever. So a node is excluded only if enough nodes
remain that have at least its CPUs, memory and generic resources: each job that fits it also fits these.

A bad node attracts jobs, because each job on it ends soon and leaves it free.

Each user has one small append-only file, also for clusters that share a home. A node is known by its cluster
and its name. A failure expires, because nodes are repaired.
"""

import json
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcrun import slurm
from hpcrun.slurm.commands import given_option
from hpcrun.slurm.nodes import NodeRow, parse_sinfo_gres, sinfo_gres_command
from hpcrun.slurm.notation import expand

# sinfo's long state names; a "*" at the end: the node does not respond, "$": maintenance.
_LIVING = ("idle", "mixed", "allocated", "completing", "planned")
_NOT_NOW = ("*", "$")
# With one of these options, only Slurm knows how many nodes fit.
_FIXING = {"nodelist": "w", "nodefile": "F", "reservation": None, "constraint": "C", "tmp": None}


@dataclass(frozen=True)
class NodeRequest:
    """The nodes that a job requests: ``nodes`` of ``partition``.

    ``fixed``: requested by name, reservation, feature or disk, so the number of alternatives is unknown.
    ``excluded``: nodes that the job already excludes.
    """

    partition: str | None
    nodes: int
    fixed: bool = False
    excluded: frozenset[str] = frozenset()


def with_options(request: NodeRequest, options: Sequence[str]) -> NodeRequest:
    """Return ``request`` as changed by further options of sbatch (``--reservation=x``, ``-w n1``)."""
    fixed = any(given_option(options, long, short) is not None for long, short in _FIXING.items())
    partition = given_option(options, "partition", "p")
    # A value in a word of its own is not read.
    return replace(
        request,
        partition=partition or request.partition,
        fixed=request.fixed or fixed or partition == "",
    )


def request_of(facts: Mapping[str, str], nodes: int = 1) -> NodeRequest:
    """Return the request of a job, from the fields of ``scontrol show job``.

    Args:
        nodes: minimum number of nodes; while a job ends, Slurm shows only the unfinished nodes.
    """
    wanted = ("ReqNodeList", "Features", "Reservation")
    count = re.match(r"\d+", facts.get("NumNodes", ""))
    return NodeRequest(
        facts.get("Partition") or None,
        max(nodes, int(count[0]) if count else 1),
        any(facts.get(key, "(null)") not in ("", "(null)") for key in wanted)
        or facts.get("MinTmpDiskNode", "0") != "0",
        excluded_nodes(facts),
    )


def excluded_nodes(facts: Mapping[str, str]) -> frozenset[str]:
    """Return the nodes that a job excludes, from the fields of ``scontrol show job``."""
    listed = facts.get("ExcNodeList", "(null)")
    return frozenset() if listed in ("", "(null)") else frozenset(expand(listed))


def nodes_to_avoid(
    request: NodeRequest,
    *,
    after: int | None,
    hours: float,
    unfit: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """Return ``unfit`` and the nodes that failed at least ``after`` times in the last ``hours``, worst first.

    As many nodes as the job needs always remain. No node is avoided if Slurm does not answer, if
    the request is fixed, or if ``after`` is None.

    Args:
        unfit: nodes that a check has just found unfit, even if they rarely failed.
    """
    if after is None or request.fixed:
        return []
    failures = node_failures(bad_nodes_path(environ), time.time() - hours * 3600)
    # The controller is asked for its name only if a node may be excluded.
    here = own_cluster(environ) if failures else ""
    bad = suspects([one for one in failures if one.cluster == here], after)
    return nodes_to_spare(list(dict.fromkeys([*unfit, *bad])), request)


def nodes_to_spare(hosts: Sequence[str], request: NodeRequest) -> list[str]:
    """Return the hosts, first ones first, without which a job with this request can still run."""
    if request.fixed or not hosts:
        return []
    listed = slurm.run(sinfo_gres_command(request.partition))
    if listed.returncode != 0:
        return []
    rows = parse_sinfo_gres(listed.stdout)
    default = {row.partition for row in rows if row.default}
    if request.partition is None and default:
        rows = [row for row in rows if row.partition in default]
    return spare(hosts, rows, request.nodes, request.excluded)


_LARGEST = 1 << 20  # bytes read from the end: thousands of failures, and never a slow submission


@dataclass(frozen=True)
class NodeFailure:
    """A failure recorded for a node; ``time`` in Unix seconds, ``run`` the run's directory.

    ``attempt``: the start of the job, such as ``12-0``; empty if it is not known.
    ``cluster``: its name; empty in the records of older versions, which count on no cluster with a name.
    """

    node: str
    time: float
    why: str
    run: str
    attempt: str = ""
    cluster: str = ""


def own_cluster(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the cluster of this job or host; empty without a cluster or an answer."""
    return environ.get("SLURM_CLUSTER_NAME") or slurm.cluster_name() or ""


def bad_nodes_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the user's bad-node list: ``$XDG_STATE_HOME/hpcrun/nodes.jsonl``."""
    state = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "hpcrun" / "nodes.jsonl"


def add_failure(
    path: Path, node: str, why: str, run: str, attempt: str = "", *, cluster: str | None = None
) -> None:
    """Record that ``node`` failed ``run``; raises OSError if the file cannot be written.

    Args:
        attempt: the start of the job.
        cluster: the cluster of the node; None: that of this job or host.
    """
    named = own_cluster() if cluster is None else cluster
    known = {"attempt": attempt, "cluster": named}
    given = {key: value for key, value in known.items() if value}
    _append(path, {"node": node, "time": round(time.time(), 3), "why": why, "run": run, **given})


def forgive(path: Path, node: str, cluster: str = "") -> None:
    """Record that ``node`` of ``cluster`` is repaired: its earlier failures no longer count.

    Raises:
        OSError: the file cannot be written.
    """
    given = {"cluster": cluster} if cluster else {}
    _append(path, {"node": node, "time": round(time.time(), 3), "forgiven": True, **given})


def node_failures(path: Path, since: float) -> list[NodeFailure]:
    """Return the failures since ``since`` (Unix seconds), oldest first; torn lines are ignored.

    A node fails a start of a job once, also where several runs share the job.
    """
    found: list[NodeFailure] = []
    seen: set[tuple[str, str, str]] = set()
    for line in _last_lines(path):
        try:
            entry = json.loads(line)
            if entry.get("forgiven"):
                repaired = (entry.get("cluster", ""), entry["node"])
                found = [one for one in found if (one.cluster, one.node) != repaired]
                continue
            one = NodeFailure(**entry)
            start = (one.cluster, one.node, one.attempt)
            if one.time < since or (one.attempt and start in seen):
                continue
            seen.add(start)
            found.append(one)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return found


def suspects(entries: list[NodeFailure], after: int) -> list[str]:
    """Return the nodes with at least ``after`` failures, worst first; all ``entries`` are of one cluster."""
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry.node] = counts.get(entry.node, 0) + 1
    worst = sorted(counts, key=lambda node: (-counts[node], node))
    return [node for node in worst if counts[node] >= after]


def spare(
    bad: Sequence[str], rows: Sequence[NodeRow], needed: int, excluded: Collection[str] = ()
) -> list[str]:
    """Return the nodes of ``bad``, worst first, without which the job can still run.

    Args:
        rows: the nodes of the job's partitions.
        needed: for each node of the result, the number of nodes with at least its resources that must remain
            in one of its partitions.
        excluded: nodes that the job excludes already.
    """
    usable = [
        row
        for row in rows
        if row.state.startswith(_LIVING)
        and not row.state.endswith(_NOT_NOW)
        and row.node not in excluded
    ]
    chosen: list[str] = []
    for node in bad:
        out = {*chosen, node}
        left = [row for row in usable if row.node not in out]
        mine = [row for row in rows if row.node in out]
        if all(any(_count(left, row) >= needed for row in mine if row.node == one) for one in out):
            chosen.append(node)
    return chosen


def _count(rows: Sequence[NodeRow], like: NodeRow) -> int:
    """Return the number of nodes in the partition of ``like`` with at least its resources."""
    return sum(row.partition == like.partition and row.has(like) for row in rows)


def _append(path: Path, entry: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, (json.dumps(entry) + "\n").encode())
    finally:
        os.close(descriptor)


def _last_lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _LARGEST))
            return stream.read().splitlines()
    except FileNotFoundError:
        return []
