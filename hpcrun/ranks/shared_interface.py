"""``job.interface: auto``: the nodes of an attempt try their interfaces and agree through the run directory.

The first rank of each node takes part. The first node collects the answers, so the number of file reads
grows with the number of nodes and not with its square.
"""

import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.network.interfaces import own_interfaces
from hpcrun.ranks.network.reachable import (
    AnswerServer,
    Listener,
    agreed,
    link_speeds,
    silent_peers,
)
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.endings import node_name
from hpcrun.run.events import Attempt
from hpcrun.run.io.files import make_log_folder, read_json, write_json

AUTO = "auto"


class NoSharedInterface(RunError):
    """No interface connects every node to every other. ``host``: the node that connects worst, if known."""

    def __init__(self, line: str, host: str | None) -> None:
        super().__init__(line)
        self.host = host


_PAUSE = 0.2


def shared_interface(
    run: RunDirectory,
    attempt: Attempt,
    config: DistributedConfig,
    timeout: float,
    *,
    pause: float = 2.0,
) -> str:
    """Return the full name of the interface, such as ``=eth0``. All ranks call this function.

    Args:
        timeout: seconds for each wait for the other nodes.
        pause: seconds between two looks of a rank that is not the first of its node: many ranks that look for
            a missing file load the metadata server of a parallel file system.

    Raises:
        RunError: a node does not answer.
            NoSharedInterface: on all ranks, if no interface connects every node to every other.
    """
    folder = run.attempt_logs(attempt.job, attempt.restart) / "interfaces"
    if config.local_rank == 0:
        found = _choose(folder, config, timeout)
    else:
        found = _waited(folder / "chosen.json", 4 * timeout, pause)
    if found["name"] is None:
        host = found["host"]
        worst = f"{host} connects worst; " if host else ""
        raise NoSharedInterface(
            f"job.interface=auto: no interface connects every node to every other ({found['why']}); {worst}"
            "name the interfaces of the job's network, or exclude a node (job.exclude)",
            host,
        )
    return f"={found['name']}"


def _choose(folder: Path, config: DistributedConfig, timeout: float) -> dict[str, Any]:
    """Try the interfaces of this node; on the first node, collect the results of all nodes and choose."""
    make_log_folder(folder)
    number, nodes = config.node_rank, range(config.num_nodes)
    own = own_interfaces()
    keeper = AnswerServer(own)
    try:
        write_json(folder / f"door-{number}.json", asdict(keeper.door))
        if number == 0:
            doors = [_waited(folder / f"door-{node}.json", timeout) for node in nodes]
            write_json(folder / "doors.json", {"doors": doors})
        doors = _waited(folder / "doors.json", 2 * timeout)["doors"]
        others = [node for node in nodes if node != number]
        silent = {
            name: [others[at] for at in places]
            for name, places in silent_peers(
                own, [Listener(**doors[node]) for node in others]
            ).items()
        }
        answer = {"host": node_name(), "silent": silent}
        write_json(folder / f"reached-{number}.json", answer)
        if number == 0:
            found = [_waited(folder / f"reached-{node}.json", timeout) for node in nodes]
            write_json(folder / "chosen.json", best_interface(found))
        # Other nodes connect to this node until the choice is published.
        return _waited(folder / "chosen.json", 2 * timeout)
    finally:
        keeper.close()


def best_interface(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the interface that all nodes found, or None with the findings and the node that connects worst.

    Args:
        found: for each node its name, and the silent nodes of each interface that reaches any node.
    """
    whole = [[name for name, silent in one["silent"].items() if not silent] for one in found]
    told = [
        f"{one['host']}: {', '.join(names) or 'none'}"
        for one, names in zip(found, whole, strict=True)
    ]
    worst = _worst([one["silent"] for one in found])
    host = None if worst is None else found[worst]["host"]
    return {"name": agreed(whole, link_speeds()), "why": "; ".join(told[:8]), "host": host}


def _worst(silent: list[dict[str, list[int]]]) -> int | None:
    """Return the node that connects worst on the most common interface; None if that is not clear.

    A broken node is silent to all other nodes, so no node reaches all others.
    """
    users = Counter(name for one in silent for name in one)
    accused = Counter(name for one in silent for name, nodes in one.items() for _ in nodes)
    best = max(users, key=lambda name: (users[name], -accused[name]), default=None)
    if best is None or 2 * users[best] <= len(silent):
        return None
    blame = Counter(node for one in silent for node in one.get(best, ()))
    blame.update({node: len(silent) for node, one in enumerate(silent) if best not in one})
    first, second = [*blame.most_common(2), (0, 0), (0, 0)][:2]
    return first[0] if first[1] > second[1] else None


def _waited(path: Path, timeout: float, pause: float = _PAUSE) -> dict[str, Any]:
    """Return the object in ``path``; raise RunError if there is none after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while (found := read_json(path)) is None:
        if time.monotonic() > end:
            raise RunError(
                f"{path}: no such file after {timeout:.0f} s, and job.interface=auto needs the file; read "
                "the logs of the other nodes, and check that all nodes see this folder"
            )
        time.sleep(pause)
    return found
