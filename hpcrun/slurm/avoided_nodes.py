"""Nodes to exclude from a job, according to the bad-node list and to Slurm.

A job that excludes all nodes on which it could run waits forever. So nodes are excluded only if enough
nodes certainly remain, and the exclusion is withdrawn if Slurm then reports that no node fits.

A bad node attracts jobs, because each job on it ends soon and leaves it free.

Each user has one small append-only file. A failure expires, because nodes are repaired.
"""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcrun import slurm
from hpcrun.slurm.commands import given_option
from hpcrun.slurm.nodes import parse_gres, parse_sinfo_gres, sinfo_gres_command
from hpcrun.slurm.notation import expand

# sinfo's long state names; a "*" at the end: the node does not respond, "$": maintenance.
_LIVING = ("idle", "mixed", "allocated", "completing", "planned")
_NOT_NOW = ("*", "$")
# With one of these options, only Slurm knows how many nodes fit.
_FIXING = {"nodelist": "w", "nodefile": "F", "reservation": None, "constraint": "C"}
_STUCK = ("BadConstraints", "ReqNodeNotAvail")
_LOOKS, _PAUSE = 10, 0.2


@dataclass(frozen=True)
class NodeRequest:
    """The nodes that a job requests: ``nodes`` of ``partition``, each with ``gpus`` (by type; "": any).

    ``fixed``: requested by name, reservation or feature, so the number of alternatives is unknown.
    ``excluded``: nodes that the job already excludes.
    """

    partition: str | None
    nodes: int
    fixed: bool = False
    gpus: Mapping[str, int] | None = None
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
    gpus = dict(parse_gres(facts.get("TresPerNode", "")))
    return NodeRequest(
        facts.get("Partition") or None,
        max(nodes, int(count[0]) if count else 1),
        any(facts.get(key, "(null)") not in ("", "(null)") for key in wanted),
        gpus or None,
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

    As many usable nodes as the job needs always remain. No node is avoided if Slurm does not answer, if
    the request is fixed, or if ``after`` is None.

    Args:
        unfit: nodes that a check has just found unfit, even if they rarely failed.
    """
    if after is None or request.fixed:
        return []
    bad = suspects(node_failures(bad_nodes_path(environ), time.time() - hours * 3600), after)
    return nodes_to_spare(list(dict.fromkeys([*unfit, *bad])), request)


def nodes_to_spare(hosts: Sequence[str], request: NodeRequest) -> list[str]:
    """Return the hosts, first ones first, without which a job with this request can still run.

    A requeued job first waits for its begin time, and only then does Slurm report that no node
    fits. So the nodes are counted before any is excluded.
    """
    if request.fixed or not hosts:
        return []
    listed = slurm.run(sinfo_gres_command(request.partition))
    if listed.returncode != 0:
        return []
    return spare(hosts, _usable(listed.stdout, request), request.nodes)


def take_back_if_stuck(job: str, given: Sequence[str]) -> str | None:
    """Exclude only ``given`` nodes again if the pending ``job`` fits on no other node.

    Call it right after an exclusion. Returns Slurm's reason if the exclusion was withdrawn, else None.
    """
    reason = _pending_reason(job)
    if reason is None or not reason.startswith(_STUCK):
        return None
    slurm.run(slurm.scontrol_exclude_command(job, given))
    return reason


def _pending_reason(job: str) -> str | None:
    """Return the reason for which the job waits, after the scheduler has considered it."""
    for _ in range(_LOOKS):
        shown = slurm.run(slurm.scontrol_show_job_command(job))
        facts = slurm.parse_show_job(shown.stdout) if shown.returncode == 0 else {}
        if facts.get("JobState") != "PENDING":
            return None
        if facts.get("Reason", "None") != "None":
            return facts["Reason"]
        time.sleep(_PAUSE)
    return None


def _usable(listed: str, request: NodeRequest) -> dict[str, dict[str, bool]]:
    """Return, for each partition of the job, its nodes and whether each could run the job now."""
    rows = parse_sinfo_gres(listed)
    default = {row.partition for row in rows if row.default}
    if request.partition is None and default:
        rows = [row for row in rows if row.partition in default]
    found: dict[str, dict[str, bool]] = {}
    for row in rows:
        living = row.state.startswith(_LIVING) and not row.state.endswith(_NOT_NOW)
        usable = living and row.node not in request.excluded
        found.setdefault(row.partition, {})[row.node] = usable and _fits(row.gres, request.gpus)
    return found


def _fits(gres: str, wanted: Mapping[str, int] | None) -> bool:
    has = parse_gres(gres)
    return all(
        sum(number for type_, number in has if kind in ("", type_)) >= count
        for kind, count in (wanted or {}).items()
    )


_LARGEST = 1 << 20  # bytes read from the end: thousands of failures, and never a slow submission


@dataclass(frozen=True)
class NodeFailure:
    """A failure recorded for a node; ``time`` in Unix seconds, ``run`` the run's directory.

    ``attempt``: the start of the job, such as ``12-0``; empty if it is not known.
    """

    node: str
    time: float
    why: str
    run: str
    attempt: str = ""


def bad_nodes_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the user's bad-node list: ``$XDG_STATE_HOME/hpcrun/nodes.jsonl``."""
    state = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "hpcrun" / "nodes.jsonl"


def add_failure(path: Path, node: str, why: str, run: str, attempt: str = "") -> None:
    """Record that ``node`` failed ``run``; raises OSError if the file cannot be written.

    Args:
        attempt: the start of the job.
    """
    reported = {"attempt": attempt} if attempt else {}
    _append(path, {"node": node, "time": round(time.time(), 3), "why": why, "run": run, **reported})


def forgive(path: Path, node: str) -> None:
    """Record that ``node`` is repaired: its earlier failures no longer count.

    Raises:
        OSError: the file cannot be written.
    """
    _append(path, {"node": node, "time": round(time.time(), 3), "forgiven": True})


def node_failures(path: Path, since: float) -> list[NodeFailure]:
    """Return the failures since ``since`` (Unix seconds), oldest first; torn lines are ignored.

    A node fails a start of a job once, also where several runs share the job.
    """
    found: list[NodeFailure] = []
    seen: set[tuple[str, str]] = set()
    for line in _last_lines(path):
        try:
            entry = json.loads(line)
            if entry.get("forgiven"):
                found = [one for one in found if one.node != entry["node"]]
                continue
            one = NodeFailure(**entry)
            if one.time < since or (one.attempt and (one.node, one.attempt) in seen):
                continue
            seen.add((one.node, one.attempt))
            found.append(one)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return found


def suspects(entries: list[NodeFailure], after: int) -> list[str]:
    """Return the nodes with at least ``after`` failures, worst first."""
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry.node] = counts.get(entry.node, 0) + 1
    worst = sorted(counts, key=lambda node: (-counts[node], node))
    return [node for node in worst if counts[node] >= after]


def spare(
    bad: Sequence[str], partitions: Mapping[str, Mapping[str, bool]], needed: int
) -> list[str]:
    """Return the nodes of ``bad``, worst first, without which the job can still run.

    Args:
        partitions: for each partition, its nodes, and whether each can run the job.
        needed: the number of nodes that must remain in one of the partitions.
    """
    chosen: list[str] = []
    for node in bad:
        if not any(node in nodes for nodes in partitions.values()):
            continue
        out = {*chosen, node}
        left = [
            sum(usable and name not in out for name, usable in nodes.items())
            for nodes in partitions.values()
        ]
        if max(left) >= needed:
            chosen.append(node)
    return chosen


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
