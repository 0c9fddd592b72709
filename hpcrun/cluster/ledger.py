"""Nodes that failed, remembered across runs: a bad node attracts jobs, because they end there so fast.

One small file a user, append-only; blame expires, because nodes are mended.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_LARGEST = 1 << 20  # bytes read from the end: thousands of failures, and never a slow submission


@dataclass(frozen=True)
class Blame:
    """A failure that a node is blamed for; ``time`` in Unix seconds, ``run`` the run's directory."""

    node: str
    time: float
    why: str
    run: str


def ledger_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the user's ledger lies: ``$XDG_STATE_HOME/hpcrun/nodes.jsonl``."""
    state = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "hpcrun" / "nodes.jsonl"


def blame(path: Path, node: str, why: str, run: str) -> None:
    """Remember that ``node`` failed ``run``; raises OSError when the file cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"node": node, "time": round(time.time(), 3), "why": why, "run": run}) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def blames(path: Path, since: float) -> list[Blame]:
    """What nodes are blamed for since ``since`` (Unix seconds), oldest first; torn lines are passed over."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _LARGEST))
            raw = stream.read()
    except FileNotFoundError:
        return []
    found = []
    for line in raw.splitlines():
        try:
            entry = Blame(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if entry.time >= since:
            found.append(entry)
    return found


def suspects(entries: list[Blame], after: int) -> list[str]:
    """The nodes with at least ``after`` blames, worst first."""
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry.node] = counts.get(entry.node, 0) + 1
    worst = sorted(counts, key=lambda node: (-counts[node], node))
    return [node for node in worst if counts[node] >= after]


def spare(bad: list[str], known: list[str], needed: int) -> list[str]:
    """As many of ``bad``, worst first, as can be done without: ``needed`` of ``known`` must remain.

    A job that excludes all it could run on would wait for ever.
    """
    room = max(0, len(known) - needed)
    return [node for node in bad if node in known][:room]
