"""The start of a preflight's agents: one task per node by srun, or processes of this machine."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrun.network.check import fleet
from hpcrun.network.check.fleet import Fleet
from hpcrun.network.preflight.checks import JobNeeds, PreflightFacts
from hpcrun.slurm.environment import without_rank_requests

_AGENT = ("-m", "hpcrun.network.preflight.agent")


# Factor of the time for the second start.
_SECOND = 2.0


def check_nodes(
    nodes: Sequence[str],
    asked: JobNeeds,
    *,
    folder: Path | None,
    interface: str | None = None,
    python: str | None = None,
    container: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> PreflightFacts:
    """Check ``nodes`` of this allocation, in the environment of the ranks.

    Args:
        folder: a shared folder, in which the nodes write and read files; None: no such check.
        interface: ``job.interface``.
        python: ``job.python``.
        container: ``job.container``.
    """
    own = without_rank_requests(environ)
    agent = [*container, python or sys.executable, *_AGENT]

    def begin(here: Sequence[str]) -> fleet.Fleet:
        command = fleet.srun_command(here, agent)
        command[1:1] = ["--mem=0", "--cpu-bind=none", "--export=ALL"]
        return fleet.Processes([(command, own)])

    return check_twice(begin, nodes, asked, folder, interface)


def check_here(
    count: int, asked: JobNeeds, *, folder: Path | None, environ: Mapping[str, str] = os.environ
) -> PreflightFacts:
    """Check this machine with ``count`` processes instead of nodes."""
    names = [f"local{index}" for index in range(count)]
    command = [sys.executable, *_AGENT]

    def begin(here: Sequence[str]) -> fleet.Fleet:
        return fleet.Processes([(command, {**environ, "HPCRUN_CHECK_NAME": name}) for name in here])

    return check_twice(begin, names, asked, folder, None)


def check_twice(
    begin: Callable[[Sequence[str]], fleet.Fleet],
    nodes: Sequence[str],
    asked: JobNeeds,
    folder: Path | None,
    interface: str | None,
) -> PreflightFacts:
    """Check ``nodes``; check nodes that do not answer in time a second time.

    A slow file system delays the start of an agent on a sound node. A node is unfit if it does not answer
    twice, or if srun reports that no task can start there. Such a node prevents the start of all tasks, so
    the other nodes are started again.

    Args:
        begin: starts an agent on each of the given nodes.
    """
    lost: dict[str, str] = {}
    while True:
        here = [node for node in nodes if node not in lost]
        started, measured = _talk(begin, here, asked, folder, interface)
        dead = fleet.not_launched(started.words(), here)
        if lost or not dead or len(dead) == len(here) or len(measured.silent) < len(here):
            break
        lost = dict.fromkeys(dead, "srun cannot start a task there")
    if measured.silent:
        late = list(measured.silent)
        started, again = _talk(begin, late, asked, folder, interface, slack=_SECOND)
        measured.add_second(again)
    if len(measured.silent) == len(here) and not lost:
        words = " ".join(started.words().split())[:300]
        measured.silent = dict.fromkeys(here, words or "no answer")
    measured.nodes, measured.silent = list(nodes), lost | measured.silent
    return measured


def _talk(
    begin: Callable[[Sequence[str]], fleet.Fleet],
    nodes: list[str],
    asked: JobNeeds,
    folder: Path | None,
    interface: str | None,
    slack: float = 1.0,
) -> tuple[fleet.Fleet, PreflightFacts]:
    started = begin(nodes)
    try:
        talk = Coordinator(started, nodes, asked, folder=folder, interface=interface, slack=slack)
        return started, talk.run()
    finally:
        started.close()


# A node answers these sections several times: once per place or device.
_LISTS = frozenset({"space", "device", "product"})
_CLOCK_READINGS = 5
_CLOCK_PATIENCE = 2.0
# Seconds for the answers to each order.
_LOOK, _WRITE, _READ, _GEMM = 60.0, 30.0, 60.0, 120.0
# Seconds for the import of torch, by all nodes from one slow file system.
_IMPORT = 300.0


class Coordinator:
    """Sends the same orders to all agents; skips a node that stops answering.

    Args:
        folder: a shared folder, in which each node writes a file; None: no such check.
        patience: seconds for the agents to start.
        slack: a factor for all limits.
    """

    def __init__(
        self,
        fleet: Fleet,
        nodes: list[str],
        asked: JobNeeds,
        *,
        folder: Path | None,
        interface: str | None = None,
        patience: float = 60.0,
        slack: float = 1.0,
    ) -> None:
        self._fleet, self._folder = fleet, folder
        self._interface, self._patience, self._slack = interface, patience, slack
        self._measured = PreflightFacts(list(nodes), asked)

    def run(self) -> PreflightFacts:
        """Gather the facts."""
        began = time.monotonic()
        measured = self._measured
        patience = self._slack * self._patience
        self._collect(patience, f"did not start within {patience:g} s", "hello")
        self._compare_clocks()
        asked = measured.asked
        look = {"gpus": asked.gpus, "run": asked.run, "interface": self._interface}
        # For processes of one machine, the names are not host names.
        hosts = measured.nodes if asked.apart else []
        self._ask({"type": "look", "hosts": hosts, **look}, _LOOK)
        if self._folder is not None:
            self._share(self._folder)
        limits = {"imports": self._slack * _IMPORT, "seconds": self._slack * _GEMM}
        # The agent checks these limits itself, and reports which limit was exceeded.
        self._ask({"type": "gemm", **limits}, _IMPORT + _GEMM + 5)
        measured.seconds = round(time.monotonic() - began, 2)
        return measured

    def _live(self) -> set[str]:
        return {node for node in self._measured.nodes if node not in self._measured.silent}

    def _ask(self, order: Mapping[str, Any], seconds: float) -> None:
        self._fleet.tell(order)
        seconds *= self._slack
        self._collect(seconds, f"no answer to {order['type']!r} within {seconds:g} s", "done")

    def _collect(self, seconds: float, why: str, last: str) -> None:
        """Read answers until every live node has sent ``last``; other nodes are skipped from then on."""
        waiting, until = self._live(), time.monotonic() + seconds

        def take(answer: Mapping[str, Any]) -> None:
            if answer.get("type") == last:
                waiting.discard(str(answer.get("node")))
            elif answer.get("type") == "fact":
                self._keep(answer)

        self._hear(until, take, lambda: not waiting)
        self._measured.silent.update(dict.fromkeys(sorted(waiting), why))

    def _hear(
        self, until: float, take: Callable[[Mapping[str, Any]], None], done: Callable[[], bool]
    ) -> None:
        while not done() and (left := until - time.monotonic()) > 0:
            answer = self._fleet.hear(left)
            if answer is None:
                return
            take(answer)

    def _keep(self, answer: Mapping[str, Any]) -> None:
        facts = self._measured.facts.setdefault(str(answer["node"]), {})
        section = str(answer["section"])
        if section in _LISTS:
            facts.setdefault(section, []).append(answer["value"])
        else:
            facts[section] = answer["value"]

    def _compare_clocks(self) -> None:
        """Read each clock several times; the reading with the shortest round trip counts (RFC 5905)."""
        best: dict[str, tuple[float, float]] = {}
        for number in range(_CLOCK_READINGS):
            self._read_clocks(number, best)
        self._measured.offsets = best

    def _read_clocks(self, number: int, best: dict[str, tuple[float, float]]) -> None:
        """Read each clock once, and keep the reading in ``best`` if its round trip is the shortest."""
        waiting = self._live()
        began, started = time.time(), time.monotonic()

        def take(answer: Mapping[str, Any]) -> None:
            if answer.get("type") != "clock" or answer.get("number") != number:
                return
            node, half = str(answer["node"]), (time.monotonic() - started) / 2
            waiting.discard(node)
            if node not in best or half < best[node][1]:
                best[node] = (round(answer["time"] - began - half, 6), round(half, 6))

        self._fleet.tell({"type": "clock", "number": number})
        self._hear(started + _CLOCK_PATIENCE, take, lambda: not waiting)

    def _share(self, folder: Path) -> None:
        """Have every node write a file, and then read the files of all."""
        try:
            place = Path(tempfile.mkdtemp(prefix=".preflight-", dir=folder))
        except OSError as error:
            problem = {"problem": f"{folder}: {error.strerror}"}
            for node in self._live():
                self._measured.facts.setdefault(node, {})["write"] = problem
            return
        try:
            self._ask({"type": "write", "folder": str(place)}, _WRITE)
            written = [
                node
                for node, facts in self._measured.facts.items()
                if "seconds" in facts.get("write", {})
            ]
            self._ask({"type": "read", "folder": str(place), "names": written}, _READ)
        finally:
            with contextlib.suppress(OSError):
                for path in place.iterdir():
                    path.unlink()
                place.rmdir()
