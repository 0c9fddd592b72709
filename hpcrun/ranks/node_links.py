"""Name the nodes that cannot connect to each other by TCP, after a start that hung in NCCL's connection.

NCCL itself names no node. The first rank of each node listens while NCCL connects, and tries the other nodes
only after the time limit.
"""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from hpcrun.ranks.addresses import listen
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.interfaces import chosen_interfaces, own_interfaces
from hpcrun.run.endings import node_name

_NEXT = 64
"""The most nodes that a node tries, in the order of the nodes: each one costs a thread for seconds."""


class NodeLinks:
    """The connections of this node. Without other nodes, and on further ranks of a node, it does nothing."""

    def __init__(self, config: DistributedConfig) -> None:
        self._node = config.node_rank
        others = range(1, min(_NEXT, config.num_nodes - 1) + 1)
        self._others = [
            (self._node + distance) % config.num_nodes
            for distance in others
            if config.local_rank == 0
        ]

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
