"""The process of a rank for a whole search: ``python -m hpcrun.network.tune.worker``.

It imports torch once and forks a process for each trial; the parent never starts CUDA or a network library.
Orders are JSON lines on standard input, answers are JSON lines on standard output.
"""

import json
import os
import select
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcrun.devices import vendor
from hpcrun.network.tune import measuring
from hpcrun.ranks.network.interfaces import own_interfaces
from hpcrun.run.endings import node_name
from hpcrun.slurm.orphans import die_with_parent

_TICK = 0.2


class Worker:
    """One rank: at most one process of a trial at a time."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._number = 0
        self._child: int | None = None
        self._orders = -1

    def say(self, facts: Mapping[str, Any]) -> None:
        """Print one answer."""
        line = json.dumps({"rank": self.rank, "trial": self._number, **facts}) + "\n"
        os.write(1, line.encode())

    def hello(self) -> None:
        """Report the facts of this node that decide which settings are tried."""
        devices = Path("/sys/class/infiniband")
        self.say(
            {
                "type": "hello",
                "host": node_name(),
                "interfaces": sorted(own_interfaces()),
                "rdma": devices.is_dir() and any(devices.iterdir()),
                "nccl": vendor.nccl_version(),
            }
        )

    def obey(self, order: Mapping[str, Any]) -> None:
        """Carry out one order."""
        if order["type"] == "trial":
            self.stop()
            self._number = order["number"]
            self._fork(order["env"])
        elif order["type"] == "stop":
            self.stop()
            self.say({"type": "stopped"})
        elif self._child is not None:
            os.write(self._orders, json.dumps(order).encode() + b"\n")

    def look(self) -> None:
        """Report a trial's process that has ended by itself, which is always a failure."""
        if self._child is None:
            return
        pid, status = os.waitpid(self._child, os.WNOHANG)
        if pid:
            self._child = None
            os.close(self._orders)
            code = os.waitstatus_to_exitcode(status)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self.say({"type": "failed", "problem": f"its process ended with {how}"})

    def stop(self) -> None:
        """End the process of the trial."""
        if self._child is not None:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            os.close(self._orders)
            self._child = None

    def _fork(self, env: Mapping[str, str]) -> None:
        reader, self._orders = os.pipe()
        parent = os.getpid()
        self._child = os.fork()
        if self._child:
            os.close(reader)
            return
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        os.environ.update(env)
        with os.fdopen(reader) as orders:
            measuring.run_trial(self.rank, self.world, orders, self.say)
        # The store of rank 0 stays for the others until the order to stop.
        signal.pause()
        os._exit(1)


def lines(worker: Worker) -> Iterator[dict[str, Any]]:
    """Yield the orders until they end; between orders, check the trial's process."""
    text = b""
    while True:
        if not select.select([0], [], [], _TICK)[0]:
            worker.look()
            continue
        read = os.read(0, 1 << 16)
        if not read:
            return
        *whole, text = (text + read).split(b"\n")
        yield from map(json.loads, whole)


def main() -> None:
    """Carry out orders until the last order, or the end of standard input."""
    worker = Worker(int(os.environ["HPCRUN_TUNE_RANK"]), int(os.environ["HPCRUN_TUNE_RANKS"]))
    worker.hello()
    for order in lines(worker):
        if order["type"] == "end":
            break
        worker.obey(order)
    worker.stop()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
