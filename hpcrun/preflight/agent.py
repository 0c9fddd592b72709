"""The part of a preflight that runs on every node, one task a node: ``python -m hpcrun.preflight.agent``.

Orders come as JSON lines on standard input, answers go as JSON lines to standard output, as those of
`hpcrun netcheck`. Each answer is short: srun mixes long lines of different tasks.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrun.cluster.devices import visible_gpus
from hpcrun.preflight import node
from hpcrun.preflight.gpus import read_gpus, read_xids

_GEMM = (sys.executable, "-m", "hpcrun.preflight.gemm")
_LONGEST = 300


class Agent:
    """A node: it answers each order with facts, and ends each answer with ``done``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._gemm: subprocess.Popen[str] | None = None

    def say(self, **words: Any) -> None:
        """Print one answer."""
        print(json.dumps({"node": self._name, **words}), flush=True)

    def fact(self, section: str, value: Any) -> None:
        """Print the facts of one section."""
        self.say(type="fact", section=section, value=value)

    def obey(self, order: Mapping[str, Any]) -> bool:
        """Carry out one order; False for the last."""
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
        if self._gemm is not None and self._gemm.poll() is None:
            self._gemm.kill()

    def _look(self, order: Mapping[str, Any]) -> None:
        gpus = order["gpus"]
        # Its imports take longest, so that it begins first.
        self._gemm = subprocess.Popen(
            [*_GEMM, *(["cpu"] if gpus == 0 else [])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
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
        try:
            out, words = self._gemm.communicate(timeout=order["seconds"])
        except subprocess.TimeoutExpired:
            self._gemm.kill()
            self.fact("gemm", {"problem": f"no result within {order['seconds']:g} s"})
            return
        for line in out.splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                self.fact("product" if "device" in record else "libraries", record)
        if self._gemm.returncode != 0:
            last = (words.strip().splitlines() or [f"exit code {self._gemm.returncode}"])[-1]
            self.fact("gemm", {"problem": last[:_LONGEST], "code": self._gemm.returncode})


def main() -> None:
    """Answer orders until the last, or until standard input ends."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # Warnings for the ranks, which reach every process of the job.
        signal.signal(number, signal.SIG_IGN)
    name = os.environ.get("HPCRUN_CHECK_NAME") or os.environ["SLURMD_NODENAME"]
    agent = Agent(name)
    agent.say(type="hello")
    try:
        for line in sys.stdin:
            if not agent.obey(json.loads(line)):
                break
    finally:
        agent.close()


if __name__ == "__main__":
    main()
