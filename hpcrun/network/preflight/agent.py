"""The part of a preflight on every node, one task per node: ``python -m hpcrun.network.preflight.agent``.

Orders are JSON lines on standard input, answers are JSON lines on standard output, as for `hpcrun netcheck`.
Each answer is short, because srun mixes long lines of different tasks.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrun.devices.devices import visible_gpus
from hpcrun.network.preflight import node
from hpcrun.network.preflight.child import Child
from hpcrun.network.preflight.gpus import read_gpus, read_xids

_GEMM = (sys.executable, "-m", "hpcrun.network.preflight.gemm")


class PreflightAgent:
    """A node: answers each order with facts, and ends each answer with ``done``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._gemm: Child | None = None

    def say(self, **words: Any) -> None:
        """Print one answer."""
        print(json.dumps({"node": self._name, **words}), flush=True)

    def fact(self, section: str, value: Any) -> None:
        """Print the facts of one section."""
        self.say(type="fact", section=section, value=value)

    def obey(self, order: Mapping[str, Any]) -> bool:
        """Carry out one order; return False for the last order."""
        kind = order["type"]
        if kind == "end":
            return False
        if kind == "clock":
            self.say(type="clock", number=order["number"], time=time.time())
            return True
        obeyed = {"look": self._look, "write": self._write, "read": self._read, "gemm": self._wait}
        obeyed[kind](order)
        self.say(type="done", of=kind)
        return True

    def close(self) -> None:
        """End the child."""
        if self._gemm is not None:
            self._gemm.kill()

    def _look(self, order: Mapping[str, Any]) -> None:
        gpus = order["gpus"]
        # The program starts first, because its imports take longest.
        self._gemm = Child([*_GEMM, *(["cpu"] if gpus == 0 else [])])
        run, hosts = order["run"], order["hosts"]
        self.fact("versions", node.versions())
        self.fact("limits", node.limits())
        for space in node.spaces(run):
            self.fact("space", space)
        self.fact("names", node.names(hosts))
        self.fact(
            "mtu", node.mtu(hosts, order["interface"] or os.environ.get("NCCL_SOCKET_IFNAME"))
        )
        if run is not None:
            self.fact("config", node.config_hash(run))
        if gpus == 0:
            return
        told = read_gpus(os.environ)
        devices = told.pop("devices", [])
        self.fact("gpus", {"visible": visible_gpus(os.environ), **told})
        for device in devices:
            self.fact("device", device)
        if devices:
            self.fact("kernel", read_xids())

    def _write(self, order: Mapping[str, Any]) -> None:
        self.fact("write", node.write(Path(order["folder"]), self._name))

    def _read(self, order: Mapping[str, Any]) -> None:
        left = node.unseen(Path(order["folder"]), order["names"])
        self.fact("unseen", {"count": len(left), "names": left[:8]})

    def _wait(self, order: Mapping[str, Any]) -> None:
        assert self._gemm is not None
        problem = self._gemm.wait(order["imports"], order["seconds"])
        for record in self._gemm.records():
            self.fact("product" if "device" in record else "libraries", record)
        if problem is not None:
            self.fact("gemm", problem)


def main() -> None:
    """Answer orders until the last, or until standard input ends."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # Warnings for the ranks, which reach every process of the job.
        signal.signal(number, signal.SIG_IGN)
    name = os.environ.get("HPCRUN_CHECK_NAME") or os.environ["SLURMD_NODENAME"]
    agent = PreflightAgent(name)
    agent.say(type="hello")
    try:
        for line in sys.stdin:
            if not agent.obey(json.loads(line)):
                break
    finally:
        agent.close()


if __name__ == "__main__":
    main()
