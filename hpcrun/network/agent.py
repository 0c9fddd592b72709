"""The program of a check on every node, one task per node: ``python -m hpcrun.network.agent``.

Orders are JSON lines on standard input, answers are JSON lines on standard output. Each answer is short,
because srun mixes long lines of different tasks.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from hpcrun.errors import one_line
from hpcrun.network.faults.node_network import read_network
from hpcrun.network.links import Links
from hpcrun.network.perftest import Perftest
from hpcrun.network.probes import added_probe, probes, read, write
from hpcrun.network.torch_child import NodeRanks
from hpcrun.ports.node_checks import Answer, Needs
from hpcrun.ranks.interfaces import own_interfaces


class Agent:
    """A node: runs the function of each order, and prints its value."""

    def __init__(self, name: str, out: TextIO = sys.stdout) -> None:
        self.name, self._out = name, out
        self._links, self._ranks, self._perftest = Links(name), NodeRanks(), Perftest()
        self._orders: dict[str, Callable[..., Any]] = {
            **{name: partial(self._probe, name) for name in probes()},
            "added": self._added,
            "write": partial(write, name=name),
            "read": read,
            "listen": self._links.listen,
            "peers": self._links.meet,
            "names": self._links.names,
            "network": partial(read_network, name=name),
            "loopback": self._links.loopback_rate,
            "round": self._links.exchange,
            "prepare": self._ranks.prepare,
            "measure": self._measure,
            "site": site,
            "hold": self._links.hold,
            "release": self._links.release,
            "reach": self._links.reach,
            "rdma": self._perftest.facts,
            "rdma-serve": self._perftest.serve,
            "rdma-measure": self._measure_rdma,
        }

    def hello(self) -> None:
        """Report that this node has started."""
        self._say(0, value=None)

    def obey(self, order: Mapping[str, Any]) -> None:
        """Carry out one order, if it is for this node. A generator gives a line for each of its items."""
        if self.name not in order.get("nodes", [self.name]):
            return
        number = order["number"]
        value = self._orders[order["do"]](**order["arguments"])
        if isinstance(value, Iterator):
            for part in value:
                self._say(number, part=part)
            self._say(number)
        else:
            self._say(number, value=value)

    def close(self) -> None:
        """End the child processes."""
        self._ranks.close()
        self._perftest.close()

    def _say(self, number: int, **facts: Any) -> None:
        line = {"node": self.name, "number": number, **facts}
        print(json.dumps(line), file=self._out, flush=True)

    def _probe(self, name: str, needs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        return (asdict(one) for one in probes()[name].function(Needs(**needs)))

    def _added(self, check: str, needs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Run a check of another package; its own failure says nothing about the node."""
        try:
            for one in added_probe(check).function(Needs(**needs)):
                yield asdict(one)
        except Exception as error:
            words, remedy = (
                f"the check itself failed: {one_line(error)}",
                "repair or uninstall its package",
            )
            yield asdict(Answer("unknown", words, remedy))

    def _measure(self, groups: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Run this node's ranks of the collectives in the group that contains this node."""
        group = next(one for one in groups if self.name in one["members"])
        rank, count = group["members"][self.name]
        return self._ranks.run({**group, "members": {}}, rank, count)

    def _measure_rdma(self, servers: Mapping[str, tuple[str, int]], seconds: int) -> dict[str, Any]:
        """Send to this node's server of ``servers``: its address and port."""
        return self._perftest.measure(*servers[self.name], seconds)


def site() -> dict[str, Any]:
    """Return the facts about this node that decide which NCCL settings are tried."""
    devices = Path("/sys/class/infiniband")
    return {
        "interfaces": sorted(own_interfaces()),
        "rdma": devices.is_dir() and any(devices.iterdir()),
    }


def main() -> None:
    """Carry out orders until standard input ends."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # Warnings for the ranks, which reach every process of the job.
        signal.signal(number, signal.SIG_IGN)
    environ = os.environ
    name = environ.get("HPCRUN_CHECK_NAME") or environ.get("SLURMD_NODENAME")
    agent = Agent(name or socket.gethostname())
    agent.hello()
    for line in sys.stdin:
        agent.obey(json.loads(line))
    agent.close()
    # Threads that still wait for a peer must not keep this process alive.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
