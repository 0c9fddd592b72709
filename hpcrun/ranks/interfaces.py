"""The network interfaces of this host: those for the rendezvous, and those for gloo and NCCL.

The first rank of each node takes part. For `shared_interface` the first node collects the answers, so the
number of file reads grows with the number of nodes and not with its square.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcrun.errors import NodeUnfit
from hpcrun.ranks.addresses import (
    AnswerServer,
    Listener,
    agreed,
    bound_address,
    is_link_local,
    is_loopback,
    is_only_loopback,
    is_sound,
    link_speeds,
    listen,
    outward_address,
    reached,
)
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.launchers import LOOPBACK, in_local_cluster, step_hosts
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.endings import node_name
from hpcrun.run.events import Attempt
from hpcrun.run.files import make_log_folder, read_json, write_json


def own_interfaces() -> dict[str, list[str]]:
    """Return the addresses of each interface that is up: IPv4 first, neither loopback nor link-local.

    IPv4's link-local addresses (169.254.x.x) are returned if this host has no other address. Such an
    address often leads only to the host's management controller.
    """
    import psutil

    state = psutil.net_if_stats()
    found: dict[str, list[str]] = {}
    local: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        if name in state and not state[name].isup:
            continue
        addresses = [
            entry.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in entries
            if entry.family == family and "%" not in entry.address
        ]
        useful = [address for address in addresses if not is_loopback(address)]
        routed = [address for address in useful if not is_link_local(address)]
        if routed:
            found[name] = routed
        elif useful:
            local[name] = useful
    return found or local


def chosen_interfaces(wanted: str, names: Iterable[str]) -> list[str]:
    """Return the ``names`` that ``wanted`` selects, as NCCL reads NCCL_SOCKET_IFNAME.

    ``wanted`` is a comma-separated list of prefixes. After ``=`` they are full names, and after ``^`` or
    ``^=`` the matching interfaces are excluded. Names come in the order of the list.
    """
    excluding = wanted.startswith("^")
    rest = wanted.removeprefix("^")
    exact = rest.startswith("=")
    patterns = [part.strip() for part in rest.removeprefix("=").split(",") if part.strip()]

    def matches(name: str, pattern: str) -> bool:
        return name == pattern if exact else name.startswith(pattern)

    names = list(names)
    if excluding:
        return [name for name in names if not any(matches(name, it) for it in patterns)]
    return list(dict.fromkeys(name for it in patterns for name in names if matches(name, it)))


def interface_variables(
    wanted: str, environ: Mapping[str, str], interfaces: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return variables that make gloo and NCCL use the interfaces in ``wanted``, unless they are set.

    NCCL reads ``wanted`` itself. gloo takes full names only, so it gets the first interface found.

    Raises:
        NodeUnfit: this host has no such interface.
    """
    chosen = chosen_interfaces(wanted, interfaces)
    if not chosen:
        have = ", ".join(f"{name} ({own[0]})" for name, own in interfaces.items()) or "none"
        raise NodeUnfit(
            f"{socket.gethostname()}: job.interface={wanted} names no interface of this node that is up "
            f"and has an address; it has {have}; correct job.interface, or exclude the node (job.exclude)"
        )
    found = {"GLOO_SOCKET_IFNAME": chosen[0], "NCCL_SOCKET_IFNAME": wanted}
    return {name: value for name, value in found.items() if not environ.get(name)}


def rendezvous_addresses(
    environ: Mapping[str, str],
    wanted: str | None = None,
    interfaces: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Return the names and addresses of this host for the other ranks to try, best first.

    Args:
        environ: the environment of rank 0.
        wanted: ``job.interface``.
        interfaces: the addresses of this host by interface; None: from the kernel.

    MASTER_ADDR comes first, then the wanted interfaces, then names that are reachable here, then numeric
    addresses, then names that only other hosts may know.
    """
    if in_local_cluster(environ):
        return [LOOPBACK]
    interfaces = own_interfaces() if interfaces is None else interfaces
    chosen = chosen_interfaces(wanted, interfaces) if wanted else []
    hosts = step_hosts(environ)
    names = [environ.get("SLURMD_NODENAME", ""), socket.gethostname()]
    sound = [name for name in names if name and is_sound(name)]
    given = environ.get("MASTER_ADDR", "")
    outward = outward_address(hosts)
    found = [
        *([given] if given and not (len(hosts) > 1 and is_only_loopback(given)) else []),
        *(address for name in chosen for address in interfaces[name]),
        *sound,
        *([outward] if outward else []),
        *(address for addresses in interfaces.values() for address in addresses),
        *names,
        *([LOOPBACK] if len(hosts) < 2 else []),
    ]
    return list(dict.fromkeys(name for name in found if name))


def gloo_interface(
    environ: Mapping[str, str],
    peers: Sequence[str],
    interfaces: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, str]:
    """Return ``GLOO_SOCKET_IFNAME`` if gloo would bind an address that ``peers`` cannot reach; else {}.

    gloo binds the first usable address of the host name, and a loopback address if there is
    none. ``peers`` are the step's other hosts, by name or, better, by an address that was seen to work.
    """
    if "GLOO_SOCKET_IFNAME" in environ or len(step_hosts(environ)) < 2:
        return {}
    interfaces = own_interfaces() if interfaces is None else interfaces
    by_address = {address: name for name, own in interfaces.items() for address in own}
    bound = bound_address(socket.gethostname())
    sound = bound is not None and not is_loopback(bound)
    outward = outward_address(peers) or (None if sound else next(iter(by_address), None))
    name = by_address.get(outward or "")
    if name is None or (sound and by_address.get(bound or "") == name):
        return {}
    return {"GLOO_SOCKET_IFNAME": name}


AUTO = "auto"


class NoSharedInterface(RunError):
    """No interface connects every node to every other."""


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
    folder = run.attempt_logs(attempt) / "interfaces"
    if config.local_rank == 0:
        found = _choose(folder, config, timeout)
    else:
        found = _waited(folder / "chosen.json", 4 * timeout, pause)
    if found["name"] is None:
        raise NoSharedInterface(
            f"job.interface=auto: no interface connects every node to every other ({found['why']}); name the "
            "interfaces of the job's network, or exclude a node (job.exclude)"
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
        others = [Listener(**doors[node]) for node in nodes if node != number]
        answer = {"host": node_name(), "reached": reached(own, others)}
        write_json(folder / f"reached-{number}.json", answer)
        if number == 0:
            found = [_waited(folder / f"reached-{node}.json", timeout) for node in nodes]
            write_json(folder / "chosen.json", _best(found))
        # Other nodes connect to this node until the choice is published.
        return _waited(folder / "chosen.json", 2 * timeout)
    finally:
        keeper.close()


def _best(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the interface that all nodes reached, or None, and the findings of the first nodes."""
    reported = [f"{one['host']}: {', '.join(one['reached']) or 'none'}" for one in found[:8]]
    return {
        "name": agreed([one["reached"] for one in found], link_speeds()),
        "why": "; ".join(reported),
    }


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


def nccl_interface(
    environ: Mapping[str, str], interfaces: Mapping[str, Sequence[str]]
) -> str | None:
    """Return the interface with which NCCL connects the ranks; None if NCCL finds none.

    Source: ``ncclFindInterfaces`` in NCCL's ``src/misc/socket.cc``.
    """
    given = environ.get("NCCL_SOCKET_IFNAME")
    for wanted in [given] if given else ["ib", "^docker,lo,virbr", "docker,lo,virbr"]:
        chosen = chosen_interfaces(wanted, interfaces)
        if chosen:
            return next(name for name in interfaces if name in chosen)
    return None


_NEXT = 64
"""The most nodes that a node tries, in the order of the nodes: each one costs a thread for seconds."""


class NodeLinks:
    """Connections to other nodes by TCP, tried after a hang in NCCL's connection, since NCCL names no node.

    The first rank of each node listens while NCCL connects. Other ranks and single nodes do nothing.
    """

    def __init__(self, config: DistributedConfig) -> None:
        self._node = config.node_rank
        near = range(self._node + 1, self._node + min(_NEXT + 1, config.num_nodes))
        self._others = [node % config.num_nodes for node in near if config.local_rank == 0]

    @contextlib.contextmanager
    def open(self, write: Callable[[str, str], None]) -> Iterator[None]:
        """Listen within the block; ``write`` publishes the address as the note of a key."""
        interfaces = own_interfaces() if self._others else {}
        name = nccl_interface(os.environ, interfaces)
        if name is None:
            yield
            return
        with listen([0]) as listener:
            port = listener.getsockname()[1]
            write(f"link/{self._node}", json.dumps([node_name(), name, interfaces[name][0], port]))
            yield
            write(f"link/{self._node}", "")

    def broken(self, read: Callable[[str], str | None], patience: float) -> dict[str, str] | None:
        """Return the nodes that do not accept a connection, with the address of each; None: nothing to try.

        Args:
            read: returns the note of a key; nothing of a node that does not listen.
            patience: seconds for all connections, which are tried at the same time.
        """
        notes = [note for node in self._others if (note := read(f"link/{node}"))]
        if not notes:
            return None

        def error(note: str) -> tuple[str, str] | None:
            host, name, address, port = json.loads(note)
            try:
                socket.create_connection((address, port), patience).close()
            except OSError as error:
                return host, f"{address} (interface {name}: {error.strerror or error})"
            return None

        with ThreadPoolExecutor(len(notes)) as pool:
            return dict(filter(None, pool.map(error, notes)))
