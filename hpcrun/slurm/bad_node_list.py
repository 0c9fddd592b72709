"""The bad-node list: nodes that failed, across runs.

A bad node attracts jobs, because each job on it ends soon and leaves it free.


Each user has one small append-only file. A failure expires, because nodes are repaired.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    told = {"attempt": attempt} if attempt else {}
    _append(path, {"node": node, "time": round(time.time(), 3), "why": why, "run": run, **told})


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
