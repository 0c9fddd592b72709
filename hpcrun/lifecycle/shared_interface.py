"""``job.interface: auto``: the nodes of an attempt try their interfaces, and agree through the run directory.

The first rank of each node takes part. The first node collects the answers, so that the number of files that
are read grows with the number of nodes and not with its square.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.cluster.interfaces import own_interfaces
from hpcrun.cluster.reachable import Door, Doorkeeper, agreed, link_speeds, reached
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import Attempt
from hpcrun.run.files import make_log_folder, read_json, write_json

AUTO = "auto"
_PAUSE = 0.2
# Many ranks that look for a missing file load the metadata server of a parallel file system.
_PAUSE_OF_OTHERS = 2.0


def shared_interface(
    run: RunDirectory, attempt: Attempt, config: DistributedConfig, timeout: float
) -> str:
    """Return the whole name of the interface, as ``=eth0``. All ranks call this function.

    Args:
        timeout: seconds for each wait for the other nodes.

    Raises:
        RunError: a node does not answer, or no interface leads from every node to every other.
    """
    folder = run.attempt_logs(attempt.job, attempt.restart) / "interfaces"
    if config.local_rank == 0:
        found = _choose(folder, config, timeout)
    else:
        found = _waited(folder / "chosen.json", 4 * timeout, _PAUSE_OF_OTHERS)
    if found["name"] is None:
        raise RunError(
            f"job.interface=auto: no interface leads from every node to every other ({found['why']}); "
            "name the interfaces of the job's network, or exclude a node (job.exclude)"
        )
    return f"={found['name']}"


def _choose(folder: Path, config: DistributedConfig, timeout: float) -> dict[str, Any]:
    """Try the interfaces of this node; on the first node, collect what all nodes found, and choose."""
    make_log_folder(folder)
    number, nodes = config.node_rank, range(config.num_nodes)
    own = own_interfaces()
    keeper = Doorkeeper(own)
    try:
        write_json(folder / f"door-{number}.json", asdict(keeper.door))
        if number == 0:
            doors = [_waited(folder / f"door-{node}.json", timeout) for node in nodes]
            write_json(folder / "doors.json", {"doors": doors})
        doors = _waited(folder / "doors.json", 2 * timeout)["doors"]
        peers = [Door(**door) for node, door in enumerate(doors) if node != number]
        write_json(folder / f"reached-{number}.json", {"names": reached(own, peers)})
        if number == 0:
            found = [_waited(folder / f"reached-{node}.json", timeout)["names"] for node in nodes]
            write_json(folder / "chosen.json", _choice(found))
        # Others connect to this node until the choice is there.
        return _waited(folder / "chosen.json", 2 * timeout)
    finally:
        keeper.close()


def _choice(found: list[list[str]]) -> dict[str, Any]:
    """Return the interface that all nodes found, or None with the findings of the nodes."""
    told = [f"node {node}: {', '.join(names) or 'none'}" for node, names in enumerate(found)]
    return {"name": agreed(found, link_speeds()), "why": "; ".join(told[:8])}


def _waited(path: Path, timeout: float, pause: float = _PAUSE) -> dict[str, Any]:
    """Return the object in ``path``; raises RunError where there is none after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while (found := read_json(path)) is None:
        if time.monotonic() > end:
            raise RunError(
                f"{path}: no such file after {timeout:.0f} s, and job.interface=auto needs the file; look at "
                "the logs of the other nodes, and at whether all nodes see this folder"
            )
        time.sleep(pause)
    return found
